"""For tests: lets vLLM's CPU build run experts of relu(x W1)^2 W2, which it has for gated activations only.

vLLM runs such experts on GPUs. Here its CPU class gets a loop over the chosen experts, in plain torch.
"""

from __future__ import annotations


def allow_relu2_experts() -> None:
    """Change vLLM's classes in this process, before an engine is made."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    ours = MoEActivation.RELU2_NO_MUL
    checked, supports, fits = (
        FusedMoEConfig.__post_init__,
        Experts._supports_activation,
        Experts._supports_grouped_gemm,
    )
    pack, run = Experts.process_weights_after_loading, Experts.apply

    def post_init(self):
        try:
            checked(self)
        except NotImplementedError as error:
            if self.activation != ours or "is_act_and_mul" not in str(error):
                raise

    def grouped_gemm(cls, moe_config):
        return (True, None) if moe_config.activation == ours else fits(moe_config)

    def process_weights(self, layer):
        if self.moe_config.activation != ours:  # ours are read as they were loaded
            pack(self, layer)

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *args, **named):
        if activation != ours:
            return run(
                self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *args, **named
            )
        output.zero_()
        for expert in topk_ids.unique().tolist():
            token_N, place_N = (topk_ids == expert).nonzero(as_tuple=True)
            out_ND = (hidden_states[token_N] @ w1[expert].T).relu().square() @ w2[expert].T
            output.index_add_(0, token_N, out_ND * topk_weights[token_N, place_N, None].to(out_ND.dtype))

    FusedMoEConfig.__post_init__ = post_init
    Experts._supports_no_act_and_mul = staticmethod(lambda: True)
    Experts._supports_activation = staticmethod(lambda kind: kind == ours or supports(kind))
    Experts._supports_grouped_gemm = classmethod(grouped_gemm)
    Experts.process_weights_after_loading, Experts.apply = process_weights, apply


def no_prefill_checkpoints() -> None:
    """For the CPU build too, whose kernels return the last Mamba state: split prompts where one is kept."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
