"""Keys, tables and the alarm's line."""

import pytest

from megatron_ext.observe import names
from megatron_ext.observe.sink import CLEARED, RAISED, AlarmRecord


def test_keys_read_back():
    assert names.parse_key(names.layer_key("max_vio", 12)) == names.Key("max_vio", layer=12)
    assert names.parse_key(names.aggregate_key("z_rms", "max_layer")) == names.Key("z_rms", part="max_layer")
    assert names.parse_key(names.step_key("peak_memory", "rank_3")) == names.Key("peak_memory", part="rank_3")
    assert names.parse_key("lm loss") == names.Key("lm_loss")


@pytest.mark.parametrize("key", ["learning-rate", "moe/unheard_of/max", "moe/max_vio/max/x", "max_vio"])
def test_other_keys_are_not_ours(key):
    assert names.parse_key(key) is None


def test_a_name_outside_the_table_is_refused():
    with pytest.raises(AssertionError, match="unheard_of"):
        names.layer_key("unheard_of", 0)


def test_every_alarm_speaks_of_a_metric_and_of_its_own_docs_entry():
    assert all(alarm.metric in names.METRICS for alarm in names.ALARMS.values())
    assert len({alarm.anchor for alarm in names.ALARMS.values()}) == len(names.ALARMS)


def test_tables_have_one_row_each():
    assert names.markdown_table().count("\n") == 2 + len(names.METRICS)
    assert names.alarm_table().count("\n") == 2 + len(names.ALARMS)


def test_the_line_names_layer_expert_and_knob():
    alarm = names.ALARMS["rogue_expert"]
    words = (alarm.why, alarm.remedy, alarm.link)
    record = AlarmRecord(alarm.name, RAISED, 120, 110, 3, 7, None, alarm.metric, 12.5, 10.0, *words)
    line = record.line()
    assert "\n" not in line
    for part in ("rogue_expert", "layer 3, expert 7", "12.5", "limit 10", "--activation-func-c", "#rogue"):
        assert part in line
    assert "cleared" in AlarmRecord(**{**record.as_json(), "state": CLEARED}).line()
