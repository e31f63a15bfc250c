import torch

from nemotron_ultra import HybridLM
from nemotron_ultra.config.model import ModelConfig


def model(**changes) -> HybridLM:
    sizes = dict(pattern="*", vocab_size=17, hidden_size=8, head_dim=4, num_attention_heads=2)
    moe = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)
    return HybridLM(
        ModelConfig(**{**sizes, **moe, "num_nextn_predict_layers": 1, **changes}), dtype=torch.float64
    )


TOKENS = torch.tensor([3, 5, 7, 9, 2, 4, 6, 8])


def test_depth_one_is_the_written_formula():
    m = model(mtp_pattern="*")
    output = m(TOKENS, mtp_depths=1)
    block = m.mtp.layers[0]
    ahead = torch.cat([TOKENS[1:], torch.tensor([0])])
    pair = [block.enorm(m.backbone.embeddings.weight[ahead]), block.hnorm(output.hidden_TD)]
    x = block.eh_proj(torch.cat(pair, -1))
    x = x + block.mixer(block.norm(x), output.segments)
    torch.testing.assert_close(output.mtp_hidden_JTD[0], block.final_layernorm(x))


def test_depths_share_the_module_and_extend_each_other():
    m = model()
    two, three = m(TOKENS, mtp_depths=2), m(TOKENS, mtp_depths=3)
    assert torch.equal(two.mtp_hidden_JTD, three.mtp_hidden_JTD[:2])
    assert len(m.mtp.layers) == 2


def test_depths_follow_the_config_and_can_be_left_out():
    assert model()(TOKENS).mtp_hidden_JTD.shape == (2, 8, 8)
    assert model(mtp_depths=3)(TOKENS).mtp_logits_JTV.shape == (3, 8, 17)
    off = model()(TOKENS, mtp_depths=0)
    assert off.mtp_hidden_JTD is None and off.mtp_logits_JTV is None
    assert model(num_nextn_predict_layers=0)(TOKENS).mtp_hidden_JTD is None


def test_no_embedding_from_the_next_document():
    m = model()
    bounds = torch.tensor([0, 5, 8], dtype=torch.int32)
    other = torch.cat([TOKENS[:5], torch.tensor([1, 1, 1])])
    first, second = (m(tokens, bounds).mtp_hidden_JTD[:, :5] for tokens in (TOKENS, other))
    assert torch.equal(first, second)


def test_router_rows_add_up_over_depths():
    output = model()(TOKENS, mtp_depths=3, trace=True)
    assert output.router.names == ["mtp.layers.1.mixer"]
    assert output.router.counts_LE.sum() == 3 * 8 * 2
    assert sorted(output.trace.router) == [f"mtp.layers.1.mixer#{k}" for k in (1, 2, 3)]


def test_names_in_the_state_dict():
    names = {n for n in model().state_dict() if n.startswith("mtp.") and "mixer" not in n}
    first = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "norm.weight"}
    second = {"norm.weight", "final_layernorm.weight"}
    assert names == {f"mtp.layers.0.{n}" for n in first} | {f"mtp.layers.1.{n}" for n in second}


def test_several_stored_modules_serve_one_depth_each():
    m = model(num_nextn_predict_layers=2)
    assert len(m.mtp.layers) == 4
    before = m(TOKENS).mtp_hidden_JTD
    m.mtp.layers[2].eh_proj.weight.data += 1
    after = m(TOKENS).mtp_hidden_JTD
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])
