"""Every metric key: unit, meaning, healthy range, what it says outside; docs/metrics.md is made from it.

`<k>` in a key stands for a number or a name without a slash: an MTP depth, an MoE layer, a layer.
"""

from __future__ import annotations

from collections.abc import Iterable

from nemotron_ultra.observe.catalog_rl import METRICS_RL
from nemotron_ultra.observe.metric import Metric

METRICS: tuple[Metric, ...] = (
    Metric(
        "step",
        "",
        "optimizer steps done; the first is 1",
        "grows by 1 a row",
        "a gap: rows were removed by hand",
    ),
    Metric(
        "tokens",
        "tokens",
        "tokens consumed since the start of the run, padding-free packed rows",
        "grows by global_batch_size x sequence_length a step",
        "less growth: the stream gave short rows",
    ),
    Metric(
        "loss",
        "nats/token",
        "mean cross-entropy of the next token over the global batch, without MTP and balance losses",
        "starts near ln(vocabulary), falls, then flattens; below the value at start at all times",
        "a rise together with grad_norm is how both divergences of the report began (2.7): go back "
        "to an earlier "
        "checkpoint, check FP32 gradients, lower optim.lr or start the decay",
    ),
    Metric(
        "mtp_<k>/loss",
        "nats/token",
        "mean cross-entropy of the token k + 1 places ahead, from MTP depth k",
        "above loss, and depth 2 above depth 1; all fall together",
        "a spike of depth 2 before the loss moves: its gradient is being lost or corrupted; in the "
        "report it came "
        "first when the head's gradient was accumulated in BF16 (2.7, divergence at 8T tokens)",
    ),
    Metric(
        "mtp_<k>/accept",
        "share",
        "labels that the argmax of MTP depth k hits: a proxy for the acceptance of drafted tokens",
        "0 to 1, grows; depth 2 below depth 1",
        "stuck near 0 while loss falls: the MTP head does not learn, look at mtp_loss_scale",
    ),
    Metric(
        "balance_loss",
        "",
        "sum over MoE layers (MTP's too) of E / (k T^2) sum_e count_e sum_t p_te, mean over tokens, "
        "before its "
        "coefficient (report 1.5)",
        "about the number of MoE layers: 1 for each that is balanced",
        "several times that: few experts take most tokens; look at MaxVio by layer",
    ),
    Metric(
        "grad_norm",
        "",
        "L2 norm of all gradients before clipping",
        "falls in the first steps, then steady, mostly below optim.clip",
        "climbs over many steps, with the loss: the report's sign of divergence (2.7); single "
        "spikes are harmless",
    ),
    Metric(
        "precision/non_finite",
        "elements",
        "NaN and infinite elements of tensors that were quantised in this step: the codes have neither, so "
        "the loss may look healthy",
        "0; only in runs with nvfp4 or mxfp8 layers",
        "an activation or gradient overflowed: look at the residual norms of the layers, lower optim.lr, go "
        "back to an earlier checkpoint",
    ),
    Metric(
        "lr",
        "",
        "learning rate of this step",
        "follows schedule over tokens",
        "jumps: the schedule was changed",
    ),
    Metric(
        "seconds",
        "s",
        "wall time of the step: forward, backward, optimizer; without validation, samples and checkpoints",
        "steady after the first step",
        "slow steps: other programs on this machine, swapping, a slow disk under the shards",
    ),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "tokens of the step / seconds",
        "steady; see docs/performance.md for figures",
        "falls: see seconds",
    ),
    Metric(
        "matmul_share",
        "share",
        "training FLOPs of the step (3 x forward) / seconds / the matmul FLOP/s measured at start "
        "on this machine",
        "steady; 0.3 to 0.6 on a CPU",
        "below: the step is bound by memory or small products; above 1: the machine was busy while "
        "it was measured",
    ),
    Metric(
        "memory_gb",
        "GB",
        "largest resident memory of the process so far (10^9 bytes)",
        "flat after the first validation",
        "grows on and on: something is kept from step to step",
    ),
    Metric(
        "moe/<k>/max_load",
        "",
        "busiest expert's tokens / mean tokens of an expert in MoE layer <k>, global batch; "
        "backbone layers first, "
        "then MTP (report 2.7)",
        "1 to E/k (23.27 for Ultra and Super, 21.33 for Nano); the report gives 1.3 for Nano, 2 for Super, "
        "a median of 1.2 for Ultra, without saying by which definition",
        "near E/k: the layer sends every token to the same experts; its bias update or its router is broken",
    ),
    Metric(
        "moe/<k>/max_vio",
        "",
        "max_load - 1, the definition of arXiv 2408.15664",
        "0 to E/k - 1; high at the start, then below 1",
        "see max_load",
    ),
    Metric(
        "moe/max_vio_median",
        "",
        "median over MoE layers of max_vio",
        "falls in the first hundred steps, then steady (report: about 1.2 throughout Ultra, "
        "definition not given)",
        "rises: router_bias_rate too small or off, or a data shift",
    ),
    Metric(
        "moe/max_vio_max",
        "",
        "largest max_vio of all MoE layers",
        "a few times the median; Ultra's first MoE layer climbed from 4.8 to about 12 by 12T tokens",
        "climbs while the median stays: one layer, in the report the first, drifts; correlated with "
        "trouble there, "
        "not shown to cause it (2.7)",
    ),
    Metric(
        "residual/<k>",
        "",
        "RMS of the residual stream after layer <k> of the backbone, over the tokens of the global batch",
        "grows with depth (by 10^3 in Super, 10^4 in Ultra at the end); rises, then settles",
        "early layers rise again late in the run: in Ultra that began at 7.5T tokens and spiked at 11T (2.7)",
    ),
    Metric(
        "val/loss",
        "nats/token",
        "loss on validation rows; weights and router bias are left alone",
        "close to the training loss",
        "rises while loss falls: the run repeats its data; on a small corpus stop there",
    ),
    Metric(
        "val/bits_per_byte",
        "bits/byte",
        "validation loss x labels / (ln 2 x bytes of the labels' text): comparable between tokenizers",
        "falls; below the xz line once the model is better than xz -9 on the same text",
        "see val/loss",
    ),
    Metric(
        "val/mtp_<k>/loss",
        "nats/token",
        "mtp_<k>/loss on validation rows",
        "close to training",
        "see mtp_<k>/loss",
    ),
    Metric(
        "val/mtp_<k>/accept",
        "share",
        "mtp_<k>/accept on validation rows",
        "close to training",
        "see mtp_<k>/accept",
    ),
    Metric(
        "val/balance_loss",
        "",
        "balance_loss on validation rows",
        "above training, as validation MaxVio is in the report (Nano 1.3 and 5, Super 2 and 6; 2.7)",
        "see balance_loss",
    ),
    Metric(
        "val/<k>/loss",
        "nats/token",
        "val/loss over the validation packs of source <k> alone; val/loss is the mean over all their labels",
        "falls for every source",
        "one source rises while others fall: it is too small and repeats, or its mixture weight is off",
    ),
    Metric(
        "packs/fill",
        "share",
        "tokens of the step's packs / (packs x data.sequence_length)",
        "0.99 and more where data.sequence_length is the pack length",
        "low: data.sequence_length is above the length that was packed, or conversations are few and long",
    ),
    Metric(
        "packs/trained_share",
        "share",
        "trained tokens of the step / its tokens: what assistants wrote",
        "steady around its mean over the data; 0.1 to 0.9 by kind of conversation",
        "near 0: masks are empty, look at them with prep preview; 1: prompts are trained too",
    ),
    Metric(
        "packs/conversations",
        "",
        "conversations of the step",
        "about pack length / mean conversation length x packs of a step",
        "far fewer: the long conversations come together; were the packs shuffled?",
    ),
    Metric(
        "packs/epoch",
        "passes",
        "passes over the training packs so far",
        "grows evenly",
        "above 3 or so with val/loss rising: the run repeats its data",
    ),
    *METRICS_RL,
)


def describe(key: str) -> Metric | None:
    """The row of the table that `key` falls under, or None."""
    return next((metric for metric in METRICS if metric.matches(key)), None)


def undocumented(keys: Iterable[str]) -> list[str]:
    """Keys that no row of the table covers."""
    return sorted(key for key in set(keys) if describe(key) is None)


def markdown() -> str:
    """The table of docs/metrics.md."""
    lines = ["| Key | Unit | Meaning | Healthy | When it is not |", "|---|---|---|---|---|"]
    for metric in METRICS:
        prose = [metric.unit or "-", metric.meaning, metric.healthy, metric.otherwise]
        prose = [cell.replace("|", "\\|").replace("<", "&lt;") for cell in prose]
        lines.append(f"| `{metric.key}` | {' | '.join(prose)} |")
    return "\n".join(lines)
