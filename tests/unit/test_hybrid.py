import torch

from nemotron_ultra import HybridLM
from nemotron_ultra.config.model import ModelConfig

SIZES = dict(
    vocab_size=19,
    hidden_size=8,
    head_dim=4,
    num_attention_heads=2,
    mamba_num_heads=2,
    mamba_head_dim=4,
    ssm_state_size=3,
    chunk_size=4,
    intermediate_size=6,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=5,
    moe_latent_size=3,
    moe_shared_expert_intermediate_size=6,
)
CONFIG = ModelConfig(pattern="ME*-E", num_nextn_predict_layers=1, **SIZES)
TOKENS = torch.arange(11) % 19


def test_output_has_what_an_objective_needs():
    output = HybridLM(CONFIG)(TOKENS, torch.tensor([0, 4, 11], dtype=torch.int32))
    assert output.logits_TV.shape == (11, 19) and output.mtp_logits_JTV.shape == (2, 11, 19)
    assert output.router.names == [f"backbone.layers.{i}.mixer" for i in (1, 4)] + ["mtp.layers.1.mixer"]
    assert output.router.counts_LE.sum(1).tolist() == [22, 22, 44]
    assert output.residual_norm_L.shape == (5,) and not output.residual_norm_L.requires_grad
    assert output.trace is None


def test_names_of_moe_layers_match_the_statistics():
    model = HybridLM(CONFIG)
    names = [name for name, _ in model.moe_layers()]
    assert names == model(TOKENS).router.names
    assert all(model.get_submodule(name).gate.weight.shape == (4, 8) for name in names)


def test_trace_holds_the_residual_stream():
    model = HybridLM(CONFIG)
    output = model(TOKENS, trace=True)
    hidden = output.trace.hidden
    assert len(hidden) == 6
    assert torch.equal(hidden[0], model.backbone.embeddings.weight[TOKENS])
    torch.testing.assert_close(model.backbone.norm_f(hidden[-1]), output.hidden_TD)
    rms = torch.stack([h.square().mean().sqrt() for h in hidden[1:]])
    torch.testing.assert_close(output.residual_norm_L, rms.detach())


def test_balance_loss_only_in_training_or_when_asked():
    model = HybridLM(CONFIG)
    assert model(TOKENS).router.balance_loss.requires_grad
    assert model(TOKENS, balance=False).router.balance_loss is None
    with torch.no_grad():
        assert model(TOKENS).router.balance_loss is None
    assert model.eval()(TOKENS).router.balance_loss is None
    assert model(TOKENS, balance=True).router.balance_loss is not None


def test_padding_on_either_side_changes_nothing():
    model = HybridLM(CONFIG, dtype=torch.float64)
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 0, 0], [4, 4, 4, 4, 4], [9, 9, 9, 9, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1] * 5, [0] * 5])
    logits = model.logits(ids, mask)
    for row in range(3):
        alone = model.logits(ids[row : row + 1, mask[row].bool()])[0]
        torch.testing.assert_close(logits[row, mask[row].bool()], alone)
    assert logits[~mask.bool()].abs().max() == 0


def test_meta_device_holds_no_memory():
    big = ModelConfig(
        pattern="ME*E", **{**SIZES, "hidden_size": 8192, "vocab_size": 131072, "n_routed_experts": 512}
    )
    model = HybridLM(big, device="meta", dtype=torch.bfloat16)
    assert all(t.is_meta for t in model.state_dict().values())
    dtypes = {n: t.dtype for n, t in model.state_dict().items()}
    fp32 = [n for n, d in dtypes.items() if d != torch.bfloat16]
    assert fp32 == [n for n in dtypes if n.endswith("e_score_correction_bias")]


def test_built_inside_a_device_context():
    with torch.device("meta"):
        model = HybridLM(CONFIG)
    assert all(t.is_meta for t in model.state_dict().values())


def test_bf16_weights_compute_in_float32_on_a_cpu():
    torch.manual_seed(0)
    stored = HybridLM(CONFIG, dtype=torch.bfloat16)
    wide = HybridLM(CONFIG)
    wide.load_state_dict(stored.state_dict())
    assert stored(TOKENS).hidden_TD.dtype == torch.float32
    torch.testing.assert_close(stored(TOKENS).logits_TV, wide(TOKENS).logits_TV)


def test_one_token_documents():
    model = HybridLM(CONFIG, dtype=torch.float64)
    bounds = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    together = model(TOKENS[:3], bounds).logits_TV
    for t in range(3):
        torch.testing.assert_close(together[t : t + 1], model(TOKENS[t : t + 1]).logits_TV)


def test_default_dtype_is_left_alone():
    HybridLM(CONFIG, dtype=torch.float64)
    assert torch.get_default_dtype() == torch.float32
