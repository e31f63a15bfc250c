"""A conversation as ids that only grow: what was drawn stays as it was drawn, new messages are put behind it.

Rendering the whole conversation again would encode the answers' text anew, which need not give the ids that
the model drew and that its next tokens were trained behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_ultra.data.render import Template
from nemotron_ultra.errors import DataError
from nemotron_ultra.generation.answers import Mode

# What a template puts behind an answer does not depend on the answer, so that any will do.
_BEFORE = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "x"})


def continued(
    template: Template,
    ids: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    mode: Mode,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    budget: int | None = None,
) -> list[int]:
    """`ids`, a prompt and its answer, then new messages and the opening of the next answer.

    An answer that was cut is closed as the template closes answers. Raises DataError for messages that cannot
    be, or where the template hides answers.
    """
    asked = {"tools": tools, "budget": budget if mode.thinking else None, "effort": mode.effort}
    whole = template.conversation([*_BEFORE, *messages], mode.thinking, **asked)
    prompt = template.prompt([*_BEFORE, *messages], mode.thinking, **asked)
    ends = [place for place, flag in enumerate(whole.mask, 1) if flag and place <= len(prompt)]
    end = next((place for place in ends if place == len(whole.mask) or not whole.mask[place]), 0)
    if not end or whole.tokens[:end] != prompt[:end]:
        raise DataError(f"chat template {template.name} does not put messages behind an answer")
    closing = whole.tokens[end - 1]
    history = list(ids[:-1] if ids[-1] in template.stop_ids else ids)
    return [*history, *([closing] if closing in template.stop_ids else []), *prompt[end:]]
