'use strict'
// Draws each chart when it comes near the screen, and wires the controls: runs on and off, steps or tokens, sliders.
;(() => {
  const drawn = []
  let axis = document.querySelector('input[name=axis]:checked')?.value
  const hidden = new Set()
  const AXIS_TITLES = { step: 'step', tokens: 'training tokens' }
  Bokeh.set_log_level('warn')

  const isFigure = (plot) => plot.renderers !== undefined
  const show = (plot) => {
    for (const renderer of plot.renderers) {
      if (renderer.name) renderer.visible = !hidden.has(renderer.name)
    }
  }
  // Columns come in pairs, `step` and `tokens`, `step_end` and `tokens_end`: a glyph's x properties name one of each.
  const turn = (plot) => {
    if (!axis || !plot.tags.includes('x-axis')) return
    for (const renderer of plot.renderers) {
      for (const name of ['x', 'x0', 'x1', 'x2', 'left', 'right']) {
        const spec = renderer.glyph[name]
        if (spec?.field === undefined) continue
        const field = spec.field.replace(/^(step|tokens)/, axis)
        if (renderer.data_source.data[field] !== undefined) renderer.glyph[name] = { field }
      }
    }
    for (const one of plot.below) {
      if (one.axis_label !== undefined) one.axis_label = AXIS_TITLES[axis]
      if (one.formatter?.format !== undefined) one.formatter.format = axis === 'tokens' ? '0.[00]a' : '0,0'
    }
  }
  const draw = async (place) => {
    const item = JSON.parse(place.nextElementSibling.textContent)
    const views = await Bokeh.embed.embed_item(item, place.id)
    const view = views.roots ? [...views.roots][0] : Object.values(views)[0]
    const plot = view.model
    drawn.push({ place, plot, view })
    place.dispatchEvent(new CustomEvent('drawn', { detail: plot }))
    if (isFigure(plot)) { show(plot); turn(plot) }
  }
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue
      near.unobserve(entry.target)
      draw(entry.target)
    }
  }, { rootMargin: '400px' })
  document.querySelectorAll('.chart').forEach((place) => near.observe(place))
  addEventListener('beforeprint', () => document.querySelectorAll('.chart:empty').forEach((place) => draw(place)))

  document.querySelectorAll('input[data-run]').forEach((box) => box.addEventListener('change', () => {
    box.checked ? hidden.delete(box.dataset.run) : hidden.add(box.dataset.run)
    drawn.forEach(({ plot }) => isFigure(plot) && show(plot))
  }))
  document.querySelectorAll('input[name=axis]').forEach((button) => button.addEventListener('change', () => {
    axis = button.value
    drawn.forEach(({ plot }) => isFigure(plot) && turn(plot))
  }))
  // The charts' colours are CSS variables, read at each paint.
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
    drawn.forEach(({ view }) => view.invalidate_layout?.())
  })

  for (const bar of document.querySelectorAll('.slider')) {
    const [button, range, output] = bar.children
    const frames = JSON.parse(bar.nextElementSibling.textContent)
    const place = bar.nextElementSibling.nextElementSibling
    const bytes = Uint8Array.from(atob(frames.data), (letter) => letter.charCodeAt(0))
    const [, rows, columns] = frames.shape
    let plot = null
    const set = () => {
      const at = Number(range.value)
      output.textContent = `step ${frames.steps[at].toLocaleString('en')}`
      if (plot === null) return
      const source = plot.renderers[0].data_source
      // The array that Bokeh holds is a view with a shape: fill a copy of it, so that the change is seen.
      const shown = source.data.image[0]
      const next = shown.constructor.from ? new shown.constructor(rows * columns, shown.shape) : shown
      next.set(bytes.subarray(at * rows * columns, (at + 1) * rows * columns))
      source.data = { ...source.data, image: [next] }
    }
    place.addEventListener('drawn', (event) => { plot = event.detail; set() })
    range.addEventListener('input', set)
    let timer = null
    const stop = () => { clearInterval(timer); timer = null; button.textContent = '▶' }
    button.addEventListener('click', () => {
      if (timer !== null) { stop(); return }
      if (range.value === range.max) range.value = 0
      button.textContent = '❚❚'
      timer = setInterval(() => {
        range.value = Number(range.value) + 1
        set()
        if (range.value === range.max) stop()
      }, 250)
    })
  }
  document.documentElement.dataset.ready = 'yes'
})()
