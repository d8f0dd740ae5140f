"""`mpatch`: the patch queue. Text and git only; it never imports torch or megatron."""
