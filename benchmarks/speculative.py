"""MTP drafts: tokens a second against draft length and batch size, CPU, float32, all sides interleaved.

    python -m nemotron_ultra.train recipe=pretrain trainer.steps=300 run.name=drafts
    python benchmarks/speculative.py runs/drafts --out speculative.html

Prompts are pieces of Python files of the torch package, which `builtin:python` does not hold; how many drafts
stay depends on how well the run learnt. Each repeat times every draft length on the same requests, in turns;
speed-ups are medians over repeats of the quotient to k = 0 of the same repeat, in CPU seconds of the process.
Tokens of all draft lengths are compared before that; "first call" is the speed-up of that very call, the
first one with drafts at this batch size, over one call without. --tail: requests of very different lengths
share the slots, as in rollouts, and the times of single requests are shown.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from statistics import median

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402

from nemotron_ultra import load_model  # noqa: E402
from nemotron_ultra.data.tokenizer import load_tokenizer  # noqa: E402
from nemotron_ultra.engine.checkpoint import latest_checkpoint  # noqa: E402
from nemotron_ultra.generation import Drafting, Request, Sampler, Scheduler  # noqa: E402
from nemotron_ultra.generation.speculative import draft_metrics  # noqa: E402
from nemotron_ultra.model.hybrid import HybridLM  # noqa: E402
from nemotron_ultra.observe import charts, html, tables  # noqa: E402
from nemotron_ultra.observe.svg import Chart, Line  # noqa: E402

PROMPT = 64
LEAST_REQUESTS = 8  # of a repeat
Sides = dict[str, int | Drafting]


def model_of(path: Path) -> tuple[HybridLM, Path]:
    """A run's latest checkpoint, or a model folder."""
    found = latest_checkpoint(path)
    folder = path if found is None else found / "model"
    return load_model(folder).eval(), folder


def prompts_of(folder: Path, count: int) -> list[list[int]]:
    tokenizer, found = load_tokenizer(folder), []
    files = sorted(Path(torch.__file__).parent.glob("nn/modules/*.py"))
    for begin in range(600, 6000, 600):
        for file in files[: count - len(found)]:
            ids = tokenizer.encode(file.read_text(encoding="utf-8")[begin : begin + 600])
            found += [ids[:PROMPT]] if len(ids) >= PROMPT else []
    assert len(found) >= count
    return found[:count]


def sides_of(lengths: list[int], sampled: bool) -> Sides:
    sides: Sides = {f"{k}": Drafting(tokens=k, sampled=sampled) for k in lengths}
    sides["adaptive"] = Drafting(tokens=max(lengths), adaptive=True, sampled=sampled)
    return sides


def sweep(model: HybridLM, prompts: list[list[int]], sides: Sides, options: argparse.Namespace) -> list[dict]:
    rows = []
    for batch in options.batches:
        groups = [prompts[i : i + batch] for i in range(0, max(batch, LEAST_REQUESTS), batch)]
        samplers = {name: Sampler(model, draft_tokens=drafts) for name, drafts in sides.items()}
        asked = dict(max_new_tokens=options.new, temperature=options.temperature)
        plain = [c.tokens for c in samplers["0"].generate(groups[0], **asked)]
        firsts: dict[str, float] = {}
        for name, sampler in samplers.items():
            begin = time.process_time()
            got = [c.tokens for c in sampler.generate(groups[0], **asked)]
            firsts[name] = time.process_time() - begin
            if got != plain and not options.sampled:
                print(f"batch {batch}, k {name}: not the tokens of k = 0 (roundings)")
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        counts: dict[str, dict[str, float]] = {}
        for number in range(options.repeat):
            order = list(samplers)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                sampler = samplers[name]
                begin, sums = time.process_time(), {}
                for group in groups:
                    sampler.generate(group, **asked)
                    sums = {k: sums.get(k, 0) + v for k, v in sampler.stats.items()}
                seconds[name].append(time.process_time() - begin)
                counts[name] = draft_metrics(sums)
        tokens = len(groups) * batch * options.new
        for name in sides:
            pairs = zip(seconds["0"], seconds[name], strict=True)
            row = {"batch": batch, "k": name, "tokens/s": round(tokens / median(seconds[name]), 1)}
            row["speed-up"] = round(median(plain / drafted for plain, drafted in pairs), 3)
            row["first call"] = round(firsts["0"] / firsts[name], 3)
            row["acceptance length"] = round(counts[name].get("acceptance_length", 1.0), 2)
            rates = [counts[name].get(f"acceptance_rate_{place}") for place in range(1, 8)]
            row["rate by place"] = " ".join(f"{rate:.2f}" for rate in rates if rate is not None)
            rows.append(row)
            print("  ".join(f"{value!s:>9}" for value in row.values()), flush=True)
    return rows


def tail(model: HybridLM, prompts: list[list[int]], sides: Sides, options: argparse.Namespace) -> list[dict]:
    """Three times as many requests as slots; a third of all tokens is in the longest few."""
    slots = max(options.batches)
    draw, rows = random.Random(0), []
    lengths = [min(8 * options.new, int(options.new / 4 / draw.random())) for _ in range(3 * slots)]
    for name, drafts in sides.items():
        scheduler = Scheduler(
            model,
            max_slots=slots,
            max_tokens=PROMPT + max(lengths),
            make_decoder=Drafting.of(drafts).decoder(model),
        )
        begin, cpu, done = time.perf_counter(), time.process_time(), []
        for number, length in enumerate(lengths):
            prompt = tuple(prompts[number % len(prompts)])
            scheduler.submit(
                Request(prompt=prompt, max_new_tokens=length, temperature=options.temperature, seed=number)
            )
        while not scheduler.idle:
            found = [event.completion for event in scheduler.step() if event.completion is not None]
            done += [(completion.stats["seconds"], len(completion.tokens)) for completion in found]
        spans = sorted(seconds for seconds, _ in done)
        row = {"k": name, "slots": slots, "requests": len(done), "tokens": sum(lengths)}
        row |= {f"p{share}, s": round(spans[len(spans) * share // 100], 2) for share in (50, 95)}
        row |= {"last, s": round(spans[-1], 2), "wall, s": round(time.perf_counter() - begin, 2)}
        rows.append(row | {"CPU, s": round(time.process_time() - cpu, 2)})
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def chart(rows: list[dict], batches: list[int]) -> Chart:
    lines = []
    for number, batch in enumerate(batches):
        points = [(int(r["k"]), r["speed-up"]) for r in rows if r["batch"] == batch and r["k"].isdigit()]
        xs, ys = zip(*points, strict=True)
        lines.append(Line(f"batch {batch}", xs, ys, colour=number, dots=True, exact=True))
    return Chart("Speed-up over k = 0", lines, log_y=False, references=[("k = 0", 1.0)], x_label="k")


def adaptive_chart(rows: list[dict], batches: list[int]) -> Chart:
    named = {(r["batch"], r["k"]): r["speed-up"] for r in rows}
    fixed = sorted({r["k"] for r in rows} - {"0", "adaptive"}, key=int)
    best = [max(named[batch, k] for k in fixed) for batch in batches]
    ys = [named[batch, "adaptive"] for batch in batches]
    lines = [
        Line("adaptive", batches, ys, colour=0, dots=True, exact=True),
        Line("best fixed k > 0", batches, best, colour=1, dots=True, exact=True),
    ]
    return Chart("Adaptive", lines, log_y=False, references=[("k = 0", 1.0)], x_label="batch")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a run's folder, or a model folder")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3, 5, 7])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--sampled", action="store_true", help="verify by rejection instead of by match")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tail", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out:
        html.check_page(options.out)
    torch.set_num_threads(int(THREADS))
    model, folder = model_of(options.model)
    sides = sides_of(sorted({0, *options.drafts}), options.sampled)
    prompts = prompts_of(folder, max(LEAST_REQUESTS, *options.batches))
    print(f"{THREADS} threads, pattern {model.config.pattern}, prompt {PROMPT}, {options.new} new tokens")
    if options.tail:
        rows = tail(model, prompts, sides, options)
        body = tables.facts(rows)
    else:
        rows = sweep(model, prompts, sides, options)
        pictures = (chart(rows, options.batches), adaptive_chart(rows, options.batches))
        body = "".join(charts.card(picture) for picture in pictures) + tables.facts(rows)
    if options.out:
        html.save_page(
            html.document("Speculative decoding", f"<h1>Speculative decoding</h1>{body}"), options.out
        )


if __name__ == "__main__":
    main()
