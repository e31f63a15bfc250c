from nemotron_ultra import HybridLM
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.ops import table
from nemotron_ultra.ops.attention import causal_attention


def test_rows_follow_the_pattern():
    assert [row.op for row in table.rows("M")] == ["mamba", "cross_entropy", "decode"]
    assert [row.op for row in table.rows("*E")] == ["attention", "experts", "cross_entropy", "decode"]
    assert len({row.op for row in table.TABLE}) == len(table.TABLE)


def test_the_model_is_built_from_the_table():
    config = ModelConfig(pattern="*", vocab_size=8, hidden_size=4, head_dim=4)
    model = HybridLM(config, device="meta")
    assert model.backbone.layers[0].mixer.attend is table.choose("attention").function is causal_attention


def test_every_line_says_what_and_why():
    for row in table.TABLE:
        assert row.line().startswith(f"{row.op}: {row.name} (nemotron_ultra.ops.")
        assert row.why in row.line() and row.passed_over in row.line()
