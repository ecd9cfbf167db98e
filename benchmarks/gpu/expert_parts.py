"""A mixture of experts in the trainer: grouped products beside experts one after the other, and where a layer's time goes.

`benchmarks.gpu.trainer --shape 30b-a3b-4` calls it. Times are of the device, medians after two turns that warm up. A part that
fails is named, and the others are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

WARM_UP, TURNS = 2, 5
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, ImportError)


def compared(
    rank: Any,
    step: Callable[[int], float],
    lengths: list[int],
    work: tuple[float, float],
    first: int,
    peak: float,
) -> dict[str, Any]:
    """Steps and layers in both ways, and the parts of a layer.

    step(n) trains on step n and returns its seconds. work: operations of a step and of its layers. first: number of the next step.
    """
    from millrace.connectors.trainers.megatron.model.experts import one_by_one

    figures: dict[str, Any] = {}
    tokens = sum(lengths)
    numbers = iter(range(first, first + 100))
    pack = pack_of(rank, lengths)
    for way, context, steps in (("grouped", nullcontext, 6), ("one by one", one_by_one, 3)):
        with attempt(f"{way}: step", figures), context():
            seconds = statistics.median([step(next(numbers)) for _ in range(steps)][1:])
            _say(figures, f"{way}: step", seconds, work[0], tokens, peak)
        with attempt(f"{way}: layers", figures), context():
            seconds = _milliseconds(lambda: layers_alone(rank, pack)) / 1e3
            rank.learner.policy.zero_grad()
            _say(figures, f"{way}: layers", seconds, work[1], tokens, peak)
    for what in ("step", "layers"):
        both = [figures.get(f"{way}: {what}", {}).get("seconds") for way in ("one by one", "grouped")]
        if None not in both:
            figures[f"{what}: one by one / grouped"] = both[0] / both[1]
            print(f"{what}: grouped products are {both[0] / both[1]:.2f} times as fast", flush=True)
    with attempt("imbalance", figures):
        figures["imbalance"] = [round(value, 3) for value in _imbalance(rank, pack)]
        print("most rows of an expert over the mean, by layer:", figures["imbalance"], flush=True)
    with attempt("parts", figures):
        figures["parts"] = _parts(rank, pack, peak)
    return figures


def _say(figures: dict[str, Any], name: str, seconds: float, work: float, tokens: int, peak: float) -> None:
    share = work / seconds / peak
    figures[name] = {"seconds": seconds, "tokens_per_second": tokens / seconds, "share_of_peak": share}
    print(
        f"{name:<22}{seconds * 1e3:9.1f} ms {tokens / seconds / 1e3:8.1f}k tok/s  {share:.1%} of peak",
        flush=True,
    )


@contextmanager
def attempt(name: str, figures: dict[str, Any]) -> Iterator[None]:
    """A context in which a failure is named in the figures, instead of ending the run."""
    try:
        yield
    except FAILURES as error:
        figures[f"{name} failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        print(name, "failed:", figures[f"{name} failed"], flush=True)


def _milliseconds(turn: Callable[[], Any]) -> float:
    import torch

    times = []
    for _ in range(WARM_UP + TURNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        turn()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[WARM_UP:])


def pack_of(rank: Any, lengths: list[int]) -> Any:
    """A pack of random tokens, whose responses are a token each."""
    import numpy as np

    from millrace.connectors.trainers.packing import BatchRow, make_pack

    draw, one = np.random.default_rng(0), np.ones(1, np.int64)
    rows = [
        BatchRow(str(number), draw.integers(0, rank.learner.passes.vocab, length), 1, one, np.zeros(1, np.float32), 1.0, 1.0, None, False, 1)
        for number, length in enumerate(lengths)
    ]  # fmt: skip
    return make_pack(rows, list(range(len(rows))), cp_size=1, cp_rank=0, align=1, device=rank.device)


def _hidden(rank: Any, pack: Any) -> Any:
    from millrace.connectors.trainers.megatron.model.attention import PackBounds

    return rank.learner.policy.models[0](
        input_ids=pack.input_ids,
        position_ids=pack.position_ids,
        attention_mask=None,
        packed_seq_params=PackBounds.of(pack),
        fp32_output=False,
    )


def layers_alone(rank: Any, pack: Any) -> None:
    """A forward and a backward pass without the head."""
    hidden = _hidden(rank, pack)
    hidden.backward(hidden.detach())


def _imbalance(rank: Any, pack: Any) -> list[float]:
    import torch

    from millrace.connectors.trainers.megatron.model.experts import ExpertsLayer

    counts: list[Any] = []
    layers = [part for part in rank.learner.policy.inner.modules() if isinstance(part, ExpertsLayer)]
    hooks = [
        layer.router.register_forward_hook(lambda _part, _inputs, out: counts.append(out[1].sum(0).float()))
        for layer in layers
    ]
    with torch.no_grad():
        _hidden(rank, pack)
    for hook in hooks:
        hook.remove()
    return [float(count.max() / count.mean()) for count in counts]


def _parts(rank: Any, pack: Any, peak: float) -> dict[str, Any]:
    """Milliseconds of a layer's parts, forward and backward, of one of the head, and of passes over the optimizer's memory."""
    import torch

    figures: dict[str, Any] = {}

    def time(name: str, turn: Callable[[], Any], work: float = 0.0) -> None:
        with attempt(name, figures):
            figures[name] = round(_milliseconds(turn), 3)
            share = f"{work / figures[name] * 1e3 / peak:8.1%} of peak" if work else ""
            print(f"  {name:<46}{figures[name]:9.3f} ms {share}", flush=True)

    layer = rank.learner.policy.inner.stages[0].decoder.layers[1]
    caught: list[Any] = []
    hook = layer.register_forward_pre_hook(lambda _part, *given: caught.append(given), with_kwargs=True)
    hidden = _hidden(rank, pack)
    hook.remove()
    (arguments, words) = caught[0]
    given = words.get("hidden_states", arguments[0] if arguments else None)
    normed = layer.input_layernorm(given.detach())
    bounds = {name: words[name] for name in ("rotary_pos_emb", "packed_seq_params")}

    def both(forward: Callable[[Any], Any]) -> Callable[[], None]:
        def turn() -> None:
            x = normed.detach().requires_grad_()
            out = forward(x)
            out.backward(out.detach())

        return turn

    time("attention, forward", lambda: layer.self_attention(normed.detach(), None, **bounds))
    time("attention, both passes", both(lambda x: layer.self_attention(x, None, **bounds)[0]))
    time("experts' layer, forward", lambda: layer.mlp(normed.detach()))
    time("experts' layer, both passes", both(lambda x: layer.mlp(x)[0]))
    time("router, both passes", both(lambda x: layer.mlp.router(x)[0]))
    with attempt("inside of experts", figures):
        _inside(layer.mlp, normed, time)

    responses = torch.arange(len(hidden) - 1, device=hidden.device)
    with attempt("head", figures):
        _head(rank, hidden, responses, pack, time)
    time("gradients to zero", rank.learner.policy.zero_grad)
    return figures


def _inside(mixture: Any, normed: Any, time: Callable[..., None]) -> None:
    """The steps of grouped experts, one by one, on this layer's real routing."""
    import torch
    from torch.nn.functional import grouped_mm

    from millrace.connectors.trainers.megatron.model import expert_kernels, expert_rows, grouped_experts

    with torch.no_grad():
        probs, routing = mixture.router(normed)
        x, k = normed.view(-1, normed.shape[-1]), mixture.config.moe_router_topk
        chosen = expert_rows.choices(routing, k)
        weights = probs.gather(1, chosen).float()
        count = len(mixture.experts.local_experts)
        rows = expert_rows.rows_of(chosen, count)
        parameters = grouped_experts.parameters_of(mixture.experts)
        parts = [parameters[start : start + count] for start in (0, count)]
        views = [grouped_experts.stacked(part) for part in parts]
        print("  weights in place:", [view is not None for view in views], flush=True)
        first, second = (
            torch.stack(part) if view is None else view for part, view in zip(parts, views, strict=True)
        )
        spread = expert_rows.take_rows(x, rows.tokens)
        inner = grouped_mm(spread, first.mT, offs=rows.ends)
        activated = grouped_experts.activated(inner, None)
        of_rows = expert_rows.in_rows(weights, rows)
        work = [2.0 * len(spread) * weight[0].numel() for weight in (first, second)]
        time("order of rows", lambda: expert_rows.rows_of(expert_rows.choices(routing, k), count))
        time("rows of tokens", lambda: expert_rows.take_rows(x, rows.tokens))
        time("first product", lambda: grouped_mm(spread, first.mT, offs=rows.ends), work[0])
        time("activation", lambda: grouped_experts.activated(inner, None))
        time("second product", lambda: grouped_mm(activated, second.mT, offs=rows.ends), work[1])
        time("weighted sum of rows", lambda: expert_rows.sum_rows(spread, rows.places, weights))
        time(
            "gradient of second product's input", lambda: grouped_mm(spread, second, offs=rows.ends), work[1]
        )
        time("gradient of activation", lambda: expert_kernels.gate_backward(inner, activated, of_rows, None))
        time("gradient of second weights", lambda: grouped_mm(spread.mT, activated, offs=rows.ends), work[1])
        time("gradient of first product's input", lambda: grouped_mm(inner, first, offs=rows.ends), work[0])
        time("gradient of first weights", lambda: grouped_mm(inner.mT, spread, offs=rows.ends), work[0])
        totals = [parameter.main_grad for parameter in parts[0]]
        total, made = grouped_experts.stacked(totals), torch.zeros_like(first)
        print("  gradients in place:", total is not None, flush=True)
        time("first weights' gradient added to its total", lambda: total.add_(made))


def _head(rank: Any, hidden: Any, places: Any, pack: Any, time: Callable[..., None]) -> None:
    """Log-probabilities of all tokens, both passes."""
    import torch
    from megatron.core import parallel_state as mpu

    from millrace.connectors.trainers.ops.logprobs import token_logprobs

    passes = rank.learner.passes
    weight = passes.inner.last.output_layer.weight

    def turn() -> None:
        x = hidden.detach().squeeze(1)[:-1].requires_grad_()
        found = token_logprobs(
            x,
            weight,
            pack.input_ids[0, places + 1],
            vocab=passes.vocab,
            group=mpu.get_tensor_model_parallel_group(),
            temperature=1.0,
            chunk=passes.config.trainer.logprob_chunk_tokens,
            entropy=True,
            entropy_gradient=False,
        )
        found.targets.backward(torch.ones_like(found.targets))

    time("head, both passes", turn)
