"""A worker's side of `KvartsLayers`: it lands what its scheduler has staged, and takes into the pool what is to be saved."""

import kvarts

from .landing import Device, Dock, Processor
from .link import logger
from .vllm_messages import Facts, Step, Told
from .vllm_stats import Stats


class Mover:
    """One for each worker. `plan`: where pages lie; `settings`: what the operator says."""

    def __init__(self, plan, settings):
        self.plan, self.settings, self.stats = plan, settings, Stats()
        self.facts = None
        self._link = settings.link()
        self._dock = None
        self._order = {}  # layer -> (group, its place among the group's layers)
        self._step = Step()
        self._heard = set()  # layers that waited in some pass
        self._waited = set()  # layers that waited in this one
        self._is_layered = False  # whether this pass waits layer by layer
        # A pass without its draft model waits for none of the draft's layers.
        self._may_layer = not plan.drafts
        self._landings, self._savings = [], []  # of this step
        self._going = []  # those that may still move bytes
        self._coming = []  # (request, landing) of those for which requests wait
        self._done, self._landed = {}, set()
        self._unwaited = set()

    def register(self, kv_caches):
        placed = self.plan.placed(kv_caches)
        streams = Processor() if placed.device is None else Device(placed.device)
        self._order = placed.order
        self._dock = Dock(self._link, streams, placed.memories, placed.groups)
        self.facts = Facts(placed.facts)

    def begin(self, step):
        """Before anything of a step runs."""
        if self._landings or self._savings:
            self.end()  # a step whose end vLLM did not tell
        self._step, self._waited, self._is_layered = step, set(), False
        self._dock.attach(step.pool, step.naming)
        self.take()
        self._savings = [self._dock.save(save.number, save.stretches, save.slots) for save in step.saves]

    def take(self):
        """Takes notice of what has ended."""
        for one in [one for one in self._going if one.is_done()]:
            self._going.remove(one)
            self._done[one.number] = 1
        for name, landing in [one for one in self._coming if one[1].is_done()]:
            self._coming.remove((name, landing))
            self._done[landing.number] = 1
            self._landed.add(name)

    def load(self, runs_by_layer):
        """Begins this step's loads; the pass that comes waits for them by layers, or as a whole, but not for those that requests wait for."""
        loads, self._step.loads = self._step.loads, []
        for load in loads:
            if load.waits is not None:
                self._coming.append((load.waits, self._dock.land(load.number, load.stretches, load.slots)))
                self.stats.add("landed", self._coming[-1][1].blocks)
        loads = [load for load in loads if load.waits is None]
        if not loads:
            return
        self._landings = [self._dock.land(load.number, load.stretches, load.slots) for load in loads]
        self._is_layered = runs_by_layer and self._may_layer and self._heard.issuperset(self._order)
        if not self._is_layered:
            self._await_all()
        self.stats.add("landed", sum(landing.blocks for landing in self._landings))
        self.stats.add("layers", len(self._order))
        self.stats.add("layered", len(self._order) if self._is_layered else 0)

    def _await_all(self):
        for place in self._order.values():
            self._await(place)

    def _await(self, place):
        for landing in self._landings:
            landing.await_layer(*place)

    def wait_for(self, name):
        """What this layer computes, it computes with what was landed."""
        place = self._order.get(name)
        if place is None:
            return  # it has no cache of its own
        self._heard.add(name)
        self._waited.add(name)
        if self._is_layered:
            self._await(place)

    def save(self, name):
        """This layer leaves, behind its computation. Where a batch is computed in parts it leaves at the end, with all of them."""
        place = self._order.get(name)
        for saving in self._savings if place is not None and not self.plan.has_parts else ():
            saving.layer(*place)

    def end(self):
        """After the forward pass, also if there was none."""
        if self._is_layered:
            # What a later step writes to these pages, it writes behind them.
            self._await_all()
            if not self._waited.issuperset(self._order):
                self._missed()
        for saving in self._savings:
            saving.finish()
        if self._savings:
            # Pages that leave may be another request's in the next step, from its very beginning.
            # ends: on a GPU at once, as streams wait; on a processor after copies in memory
            self._dock.streams.join()
        self._going += self._landings + self._savings
        self._landings, self._savings, self._is_layered = [], [], False
        self.take()

    def _missed(self):
        """A layer that waited in other passes did not in this one: what it computed with, nobody knows."""
        missed = next(name for name in self._order if name not in self._waited)
        logger.error("kvarts: a forward pass did not wait for the layer %s: from now on each pass waits for all layers before it begins", missed)
        self._may_layer = False
        for landing in self._landings:
            self._unwaited.update(landing.slots)
        self.stats.add("dropped", sum(landing.blocks for landing in self._landings), "Unwaited")

    def take_unwaited(self):
        unwaited, self._unwaited = self._unwaited, set()
        return unwaited

    def take_landed(self):
        """Requests for which all that they waited for has landed."""
        self.take()
        landed, self._landed = self._landed, set()
        return landed

    def tell(self):
        done, self._done = self._done, {}
        return Told({self.plan.worker: self._dock.name}, done)

    def take_stats(self):
        return self.stats.take()

    def close(self):
        try:
            for one in [*self._going, *(landing for _, landing in self._coming)]:
                one.is_done(self.settings.timeout)
            (self._dock or self._link).close(self.settings.timeout)
        except kvarts.Error as error:
            logger.warning("kvarts: %s", error)
