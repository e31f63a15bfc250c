"""What holds for every input of the packer: seeded random mixtures against a plain reading of the report."""

import json
from collections import Counter

import numpy as np
import pytest

from nemotron_ultra.data.packing import BestFitPacker, pack_lengths

SEEDS = range(40)


def naive(lengths, prompts, max_length, pool_size, window, tolerance):
    """Report 3.2 word by word: look at every open pack for each conversation. Open packs are
    [room, items, prompts], the one changed last at the end, which wins among equals."""
    open_packs, done = [], []

    def place(item):
        fitting = [
            pack
            for pack in open_packs
            if pack[0] >= lengths[item] and (prompts[item] is None or prompts[item] not in pack[2])
        ]
        if fitting:
            pack = min(reversed(fitting), key=lambda pack: pack[0])
            open_packs.remove(pack)
        else:
            if len(open_packs) == pool_size:
                fullest = min(reversed(open_packs), key=lambda pack: pack[0])
                open_packs.remove(fullest)
                done.append(fullest[1])
            pack = [max_length, [], []]
        pack[0] -= lengths[item]
        pack[1].append(item)
        pack[2].append(prompts[item])
        if pack[0] < max(1, tolerance):
            done.append(pack[1])
        else:
            open_packs.append(pack)

    coming = [i for i, length in enumerate(lengths) if length <= max_length]
    for start in range(0, len(coming), window):
        for item in sorted(coming[start : start + window], key=lambda i: -lengths[i]):
            place(item)
    return done + [pack[1] for pack in sorted(reversed(open_packs), key=lambda pack: pack[0])]


def draw(seed):
    """(lengths, prompts, sources, options) of a random kind."""
    random = np.random.default_rng(seed)
    max_length = int(random.choice([1, 7, 64, 100, 1000, 5000]))
    count = int(random.integers(1, 700))
    lengths = np.ceil(max_length * random.random(count) ** random.choice([0.5, 1, 3, 8])).astype(int)
    lengths[random.random(count) < 0.03] = max_length + 1 + int(random.integers(100))
    lengths = np.maximum(lengths, 1)
    prompts = [int(p) for p in random.integers(0, random.choice([2, 10, count, 10**9]), count)]
    prompts = [None if random.random() < 0.1 else prompt for prompt in prompts]
    sources = random.integers(0, 4, count)
    pool_size = int(random.choice([1, 3, 16, 200]))
    options = {
        "max_length": max_length,
        "pool_size": pool_size,
        "window": int(random.integers(1, 2 * pool_size + 1)),
        "tolerance": int(random.integers(0, max(1, max_length // 20) + 1)),
    }
    return lengths.tolist(), prompts, sources.tolist(), options


def packer_of(options):
    options = dict(options)
    return BestFitPacker(options.pop("max_length"), **options)


def whole(seed):
    lengths, prompts, sources, options = draw(seed)
    packer = packer_of(options)
    packs = packer.extend(lengths, range(len(lengths)), prompts, sources) + packer.finish()
    return packs, packer.stats


@pytest.mark.parametrize("seed", SEEDS)
def test_every_item_once_in_a_pack_that_holds_it_without_its_prompt_twice(seed):
    lengths, prompts, _, options = draw(seed)
    packs, _ = whole(seed)
    fitting = [i for i, length in enumerate(lengths) if length <= options["max_length"]]
    assert sorted(i for pack in packs for i in pack) == fitting
    for pack in packs:
        assert 0 < sum(lengths[i] for i in pack) <= options["max_length"]
        named = [prompts[i] for i in pack if prompts[i] is not None]
        assert len(named) == len(set(named))


@pytest.mark.parametrize("seed", SEEDS)
def test_counts_add_up_by_source(seed):
    lengths, _, sources, options = draw(seed)
    packs, stats = whole(seed)
    fits = [length <= options["max_length"] for length in lengths]
    for source, counts in stats.sources.items():
        of = [i for i, number in enumerate(sources) if number == source]
        kept, lost = [i for i in of if fits[i]], [i for i in of if not fits[i]]
        assert (counts.items, counts.dropped) == (len(kept), len(lost))
        assert counts.tokens == sum(lengths[i] for i in kept)
        assert counts.dropped_tokens == sum(lengths[i] for i in lost)
    assert set(stats.sources) == set(sources)
    assert (stats.packs, stats.items) == (len(packs), sum(fits))
    assert stats.tokens == sum(counts.tokens for counts in stats.sources.values())
    assert stats.dropped == len(lengths) - sum(fits)


@pytest.mark.parametrize("seed", SEEDS)
def test_best_fit_is_the_tightest(seed):
    lengths, prompts, _, options = draw(seed)
    assert whole(seed)[0] == naive(lengths, prompts, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_chunking_and_any_interruption_give_the_same_packs(seed):
    lengths, prompts, sources, options = draw(seed)
    random = np.random.default_rng(seed + 1000)
    packer, packs, at = packer_of(options), [], 0
    while at < len(lengths):
        if random.random() < 0.5:
            packs += packer.add(lengths[at], at, prompts[at], sources[at])
            at += 1
        else:
            stop = at + int(random.integers(0, 200))
            rows = range(at, min(stop, len(lengths)))
            packs += packer.extend(lengths[at:stop], rows, prompts[at:stop], np.array(sources[at:stop], int))
            at += len(rows)
        if random.random() < 0.1:
            state = json.loads(json.dumps(packer.state_dict()))
            packer = packer_of(options)
            packer.load_state_dict(state)
    packs += packer.finish()
    wanted, stats = whole(seed)
    assert packs == wanted
    assert packer.stats == stats


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_pack_lengths_is_the_same_packs_in_another_order(seed):
    lengths, prompts, _, options = draw(seed)
    packs, _ = pack_lengths(np.array(lengths), prompt_ids=prompts, seed=seed, **options)
    assert Counter(map(tuple, packs)) == Counter(map(tuple, whole(seed)[0]))


def test_the_random_inputs_reach_every_rule():
    stats = [whole(seed)[1] for seed in SEEDS]
    assert sum(one.evicted > 0 for one in stats) > 5
    assert sum(one.conflicts > 0 for one in stats) > 5
    assert sum(one.dropped > 0 for one in stats) > 5
