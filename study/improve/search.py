"""The search as a function of the finished trials: which trials come next, and what is known of each lever.

    baseline -> rounds of levers, the largest upper bounds first -> the significant ones combined -> ... -> final

Each round compares a few levers with the best configuration so far, in the same worker groups. A lever is kept if the
interval of its gain, corrected for the number of comparisons, is above 1. Levers that lost are tried once more after
the bottleneck has moved. The final round compares the result with the baseline in fresh worker groups.
"""

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from analysis.statistics import CONFIDENCE
from study.improve.attempts import UNKNOWN, Attempt, attempt, compared, is_lost, reason_of
from study.improve.budget import GROUPS, can_set_seeds, last_round_of, needed
from study.improve.evidence import Evidence, Ratio
from study.improve.lever import changed_fields, changes_batch
from study.improve.losses import LossCheck, check_losses
from study.improve.rounds import SEEDS, Configuration, Round, Settings

FINAL_GROUPS, LEAST_FINAL_GROUPS = 5, 3
"""Worker groups of the final comparison; it has fewer if the budget would not allow one lever else."""

LEVERS_PER_ROUND = 3
MOST_TRIES = 2

LEAST_BOUND = 1.005
"""Levers with a smaller upper bound are not tried."""


@dataclass
class Search:
    """What a search has found so far.

    pending: the round to run next; None if the search has ended. best: the configuration so far, () for the baseline.
    steps: each addition to it, with its gain over the one before. chosen: the verified configuration; None before the
    end. problem: why the search cannot go on. not_tried: levers that apply, for which the budget did not suffice, with
    their bounds. least: trials and seconds that the search would have needed to try one of them. dropped: why a lever
    that gained is not part of the best configuration.
    """

    rounds: list[Round] = field(default_factory=list)
    pending: Round | None = None
    attempts: list[Attempt] = field(default_factory=list)
    best: Configuration = ()
    steps: list[tuple[Configuration, Ratio]] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    not_tried: dict[str, float | None] = field(default_factory=dict)
    least: tuple[int, float] | None = None
    chosen: Configuration | None = None
    verified: Configuration = ()
    final: Ratio = UNKNOWN
    final_on_one: Ratio = UNKNOWN
    final_on_all: Ratio = UNKNOWN
    losses: LossCheck | None = None
    problem: str = ""

    def last_round_of(self, configuration: Configuration) -> Round | None:
        """Return the last finished round that measured a configuration."""
        return last_round_of(configuration, self.rounds)


def replay(settings: Settings, evidence: Evidence) -> Search:
    """Return the state of the search after the finished trials, with the round that comes next."""
    found = Search()
    steps = _steps(settings, evidence, found)
    for pending in steps:
        if not set(pending.trial_ids) <= set(evidence.runs):
            found.pending = pending
            break
        found.rounds.append(pending)
        if is_lost(pending, evidence):
            found.problem = reason_of(pending, pending.configurations[0], evidence)[1] or "the baseline has no result"
            break
    return found


def _steps(settings: Settings, evidence: Evidence, found: Search) -> Generator[Round, None, None]:
    """Yield each round. The code after a `yield` may only use the trials of the rounds so far."""
    number = itertools.count()
    yield Round(next(number), "baseline", [()], 1, breakdowns=[()]).planned_for(settings)
    comparisons = max(1, MOST_TRIES * sum(_applies(settings, (), name) for name in settings.levers))
    confidence = 1 - (1 - CONFIDENCE) / comparisons
    while candidates := _candidates(settings, evidence, found):
        bounds, reference = dict(candidates), found.best
        affordable = [name for name in bounds if _fits_with(settings, evidence, found, [name])]
        tried = _together(settings, reference, affordable, _most_levers(settings, evidence, found))
        while len(tried) > 1 and not _fits_with(settings, evidence, found, tried):
            tried.pop()
        if not tried:
            found.not_tried = bounds
            found.least = needed(settings, evidence, found.rounds, [found.best] * 2, found.best, LEAST_FINAL_GROUPS)
            break
        bottleneck = _shares(settings, evidence, found)[1]
        members = [reference, *((*reference, name) for name in tried)]
        yield Round(next(number), "levers", members, GROUPS, breakdowns=[reference]).planned_for(settings)
        judge = partial(attempt, settings, evidence, found.rounds, bottleneck=bottleneck, confidence=confidence)
        attempts = [judge(((*reference, name), reference), bounds[name]) for name in tried]
        promising = [a for a in attempts if a.is_promising and not a.is_gain]
        again = [reference, *((*reference, a.lever) for a in promising)]
        if promising and _fits(settings, evidence, found, again):
            yield Round(next(number), "confirm", again, GROUPS).planned_for(settings)
            attempts = [judge(((*reference, a.lever), reference), a.bound) if a in promising else a for a in attempts]
        elif promising:  # without time to measure it again, the final comparison decides
            attempts = [replace(a, is_gain=a.is_gain or a.is_promising) for a in attempts]
        found.attempts += attempts
        winners = sorted((a for a in attempts if a.is_gain), key=lambda a: -a.gain.value)
        if not winners:
            continue
        found.best = (*reference, winners[0].lever)
        found.steps.append((found.best, winners[0].gain))
        chain = _chain(settings, found, [a.lever for a in winners[1:]])
        while len(chain) > 1 and not _fits(settings, evidence, found, chain, LEAST_FINAL_GROUPS):
            found.dropped[chain.pop()[-1]] = "the budget did not suffice to combine it"
        if len(chain) > 1:
            yield Round(next(number), "combine", chain, GROUPS).planned_for(settings)
            _combine(settings, evidence, found, chain)
    while found.best:
        groups = range(FINAL_GROUPS, LEAST_FINAL_GROUPS, -1)
        most = next((n for n in groups if _fits(settings, evidence, found, (), n)), LEAST_FINAL_GROUPS)
        yield _final_round(next(number), settings, found.best, most)
        if not _verify(settings, evidence, found):
            break
        if found.best and not _fits(settings, evidence, found, (), LEAST_FINAL_GROUPS):
            found.dropped |= {name: "the budget did not suffice to verify it" for name in found.best}
            found.best = ()
    found.chosen = found.best
    _estimate_by_all_rounds(settings, evidence, found)


# ------------------------------------------------------------------------------------------------------- candidates


def _applies(settings: Settings, onto: Configuration, name: str) -> bool:
    return settings.trial((*onto, name)) is not None


def _candidates(settings: Settings, evidence: Evidence, found: Search) -> list[tuple[str, float | None]]:
    """Return the levers to try on the best configuration, with their upper bounds, the largest first.

    Values that the user gave come before all others, then levers that are first; those of unknown bound come last.
    """
    shares, bottleneck = _shares(settings, evidence, found)
    no_memory_for = {"", *(a.lever for a in found.attempts if a.status == "out_of_memory")}
    before = settings.trial(found.best)
    assert before is not None
    known = [settings.trial((*a.onto, a.lever)) for a in found.attempts if a.onto == found.best]
    candidates = []
    for name, lever in settings.levers.items():
        after = settings.trial((*found.best, name))
        if (
            name in found.best
            or lever.if_no_memory_for not in no_memory_for
            or after is None
            or after in known  # another lever does the same here
            or not _may_try(settings, found, name, bottleneck)
        ):
            continue
        bound = lever.bound(shares, before, settings.machine)
        if settings.is_training and lever.effect == "arithmetic":
            bound = None  # it also changes how many steps the training takes
        if bound is None or bound >= LEAST_BOUND:
            candidates.append((name, bound))
            known.append(after)
    tried = {a.lever for a in found.attempts}

    def order(candidate: tuple[str, float | None]) -> tuple[int, float, bool]:
        name, bound = candidate
        lever = settings.levers[name]
        group = 0 if not lever.parts else 1 if lever.is_first else 2
        return group, 0.0 if bound is None else -bound, name in tried

    return sorted(candidates, key=order)


def _may_try(settings: Settings, found: Search, name: str, bottleneck: str | None) -> bool:
    """Return True if a lever is new, or if the step has changed since it lost.

    That is so if something else bounds the step, or if a lever that acts on the same part of it was added.
    """
    tries = [a for a in found.attempts if a.lever == name]
    if not tries or len(tries) >= MOST_TRIES or tries[-1].status != "done":
        return not tries
    added = set(found.best) - set(tries[-1].onto)
    parts = {part for other in added for part in settings.levers[other].parts}
    return tries[-1].bottleneck != bottleneck or bool(parts & set(settings.levers[name].parts))


def _together(settings: Settings, best: Configuration, names: Sequence[str], most: int) -> list[str]:
    """Return the first levers that change different fields, since only one of several for the same field can win.

    A lever that `is_first` is alone.
    """
    if most and names and settings.levers[names[0]].is_first:
        return [names[0]]
    before, chosen, taken = settings.trial(best), list[str](), set[str]()
    for name in names:
        after = settings.trial((*best, name))
        fields = set(changed_fields(before, after)) if before and after else set()
        if len(chosen) < most and not fields & taken:
            chosen.append(name)
            taken |= fields
    return chosen


def _shares(settings: Settings, evidence: Evidence, found: Search) -> tuple[dict[str, float], str | None]:
    """Return the shares of the best configuration's step, and what bounds it, as the last round that has it shows."""
    done = shares_from(settings, evidence, found.rounds, found.best)
    if not done:
        return {}, None
    shares, bottleneck = evidence.shares(done)
    return dict(shares), bottleneck


def shares_from(
    settings: Settings, evidence: Evidence, rounds: Sequence[Round], configuration: Configuration
) -> tuple[str, ...]:
    """Return the done trials that show the parts of a configuration's step, of the last round that has some."""
    rounds = [done for done in rounds if not settings.is_training or done.breakdown_ids(configuration)]
    last = last_round_of(configuration, rounds)
    if last is None:
        return ()
    names = last.breakdown_ids(configuration) if settings.is_training else last.ids_of(configuration)
    return tuple(name for name in names if evidence.runs[name].status == "done")


def _most_levers(settings: Settings, evidence: Evidence, found: Search) -> int:
    """Return how many levers the next round may have."""
    counts = range(LEVERS_PER_ROUND, 0, -1)
    options = itertools.product((FINAL_GROUPS, LEAST_FINAL_GROUPS), counts)
    return next((n for groups, n in options if _fits(settings, evidence, found, [found.best] * (n + 1), groups)), 0)


def _fits(
    settings: Settings,
    evidence: Evidence,
    found: Search,
    members: Sequence[Configuration],
    final_groups: int = FINAL_GROUPS,
) -> bool:
    """Return True if the budget allows a round of these members (none: no round), and the final one of the last."""
    best = members[-1] if members else found.best
    trials, seconds = needed(settings, evidence, found.rounds, members, best, final_groups)
    return (settings.trials is None or trials <= settings.trials) and (
        settings.budget_s is None or seconds <= settings.budget_s
    )


def _fits_with(settings: Settings, evidence: Evidence, found: Search, levers: Sequence[str]) -> bool:
    """Return True if the budget allows a round of the best configuration with each of these levers."""
    members = [found.best, *((*found.best, name) for name in levers)]
    return _fits(settings, evidence, found, members, LEAST_FINAL_GROUPS)


def _chain(settings: Settings, found: Search, names: Sequence[str]) -> list[Configuration]:
    """Return the best configuration, then with one lever more each; levers that do not go together are left out."""
    chain = [found.best]
    for name in names:
        if _applies(settings, chain[-1], name):
            chain.append((*chain[-1], name))
        else:
            found.dropped[name] = f"does not go together with {' and '.join(chain[-1])}"
    return chain


# ----------------------------------------------------------------------------------------------------- combination


def _combine(settings: Settings, evidence: Evidence, found: Search, chain: Sequence[Configuration]) -> None:
    """Extend the best configuration along the chain, until an addition is no significant gain."""
    for position, (before, after) in enumerate(itertools.pairwise(chain), 2):
        further = compared(settings, evidence, found.rounds, (after, before))
        if not further.is_gain(settings):
            found.dropped[after[-1]] = f"no further gain with {' and '.join(before)}"
            found.dropped |= {names[-1]: f"not combined, since {after[-1]} failed to" for names in chain[position:]}
            return
        found.best = after
        found.steps.append((after, further.gain))


# ------------------------------------------------------------------------------------------------------------ final


def without_batch_levers(settings: Settings, configuration: Configuration) -> Configuration:
    """Return the configuration without levers that change how many samples a step has."""
    kept: Configuration = ()
    for name in configuration:
        before, after = settings.trial(kept), settings.trial((*kept, name))
        if before and after and not changes_batch(changed_fields(before, after)):
            kept = (*kept, name)
    return kept


def _final_round(number: int, settings: Settings, best: Configuration, groups: int) -> Round:
    """Compare the best configuration with the baseline, and its losses with those of other seeds if it changes them."""
    losses: list[tuple[Configuration, int]] = []
    if _moves_loss(settings, best) and can_set_seeds(settings):
        same_batch = without_batch_levers(settings, best)
        losses = [((), seed) for seed in range(1, SEEDS + 1)]
        losses += [] if same_batch == best else [(same_batch, 0)]
    return Round(number, "final", [(), best], groups, losses, [(), best]).planned_for(settings)


def _estimate_by_all_rounds(settings: Settings, evidence: Evidence, found: Search) -> None:
    """Update the gains of what was chosen. Rounds after the one that found a gain often measure both sides again."""

    def updated(of: Attempt) -> Attempt:
        now = compared(settings, evidence, found.rounds, ((*of.onto, of.lever), of.onto))
        return replace(of, gain=now.gain, on_one=now.on_one, on_all=now.on_all)

    kept = set(found.best)
    found.attempts = [updated(a) if a.is_gain and a.lever in kept else a for a in found.attempts]
    found.steps = [
        (names, compared(settings, evidence, found.rounds, (names, names[:-1])).gain) for names, _ in found.steps
    ]


def _moves_loss(settings: Settings, configuration: Configuration) -> bool:
    """Return True if a lever could move the loss of the same samples. A training is judged by its accuracy."""
    same_batch = without_batch_levers(settings, configuration)
    return not settings.is_training and any(settings.levers[name].effect == "arithmetic" for name in same_batch)


def _verify(settings: Settings, evidence: Evidence, found: Search) -> bool:
    """Judge the final round. Return True if another one is needed, because a lever was dropped for its losses."""
    last = found.rounds[-1]
    blocks = [last.block_name(number) for number in range(len(last.blocks))]
    verified = compared(settings, evidence, found.rounds, (found.best, ()), blocks)
    found.verified = found.best
    found.final, found.final_on_one, found.final_on_all = verified.gain, verified.on_one, verified.on_all
    if not verified.is_gain(settings):
        found.dropped |= {name: f"no significant gain in {last.groups} fresh worker groups" for name in found.best}
        found.best = ()
        return False
    if not _moves_loss(settings, found.best):
        return False
    found.losses = check_losses(last, without_batch_levers(settings, found.best), evidence)
    if found.losses is None or not found.losses.is_beyond:
        return False
    moving = {name for name in found.best if settings.levers[name].effect == "arithmetic"}
    moving -= set(found.best) - set(without_batch_levers(settings, found.best))
    found.dropped |= {name: found.losses.problem for name in moving}
    rest = tuple(name for name in found.best if name not in moving)
    found.best = rest if settings.trial(rest) is not None else ()
    return True
