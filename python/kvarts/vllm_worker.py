"""The worker's side of `KvartsLayers`: it copies staged blocks to the KV caches, and saved blocks to the pool."""

import kvarts

from .landing import Device, Dock, Processor
from .link import logger
from .vllm_messages import Facts, Step, Told
from .vllm_stats import Stats


class Mover:
    """The mover of a worker. `plan`: the positions of pages; `settings`: the operator's settings."""

    def __init__(self, plan, settings):
        self.plan, self.settings, self.stats = plan, settings, Stats()
        self.facts = None
        self._link = settings.link()
        self._dock = None
        self._order = {}  # layer -> (group, index in the group's layers)
        self._step = Step()
        self._heard = set()  # layers that waited in some pass
        self._waited = set()  # layers that waited in this one
        self._is_layered = False  # whether this pass waits layer by layer
        # A pass that does not run the draft model does not wait for the draft's layers.
        self._may_layer = not plan.drafts
        self._landings, self._savings = [], []  # of this step
        self._going = []  # landings and saves that may still move bytes
        self._coming = []  # (request, landing) of landings for which a request waits
        self._done, self._landed = {}, set()
        self._unwaited = set()

    def register(self, kv_caches):
        placed = self.plan.placed(kv_caches)
        streams = Processor() if placed.device is None else Device(placed.device)
        self._order = placed.order
        self._dock = Dock(self._link, streams, placed.memories, placed.groups)
        self.facts = Facts(placed.facts)

    def begin(self, step):
        """Begins a step, before any of its work runs."""
        if self._landings or self._savings:
            self.end()  # a step whose end vLLM did not report
        self._step, self._waited, self._is_layered = step, set(), False
        self._dock.attach(step.pool, step.naming)
        self.take()
        self._savings = [self._dock.save(save.number, save.stretches, save.slots) for save in step.saves]

    def take(self):
        """Records landings and saves that have ended."""
        for one in [one for one in self._going if one.is_done()]:
            self._going.remove(one)
            self._done[one.number] = 1
        for name, landing in [one for one in self._coming if one[1].is_done()]:
            self._coming.remove((name, landing))
            self._done[landing.number] = 1
            self._landed.add(name)

    def load(self, runs_by_layer):
        """Begins this step's loads. The next forward pass waits for them, layer by layer or as a whole. It does not wait for loads for which a request
        waits."""
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
        """Makes the computation of this layer wait until its blocks have landed."""
        place = self._order.get(name)
        if place is None:
            return  # a layer without its own cache
        self._heard.add(name)
        self._waited.add(name)
        if self._is_layered:
            self._await(place)

    def save(self, name):
        """Begins to copy this layer to the pool, after its computation. If a batch is computed in parts, all layers are copied at the end of the pass."""
        place = self._order.get(name)
        for saving in self._savings if place is not None and not self.plan.has_parts else ():
            saving.layer(*place)

    def end(self):
        """Ends a step, after its forward pass or without one."""
        if self._is_layered:
            # Later steps write to these pages only after the landings.
            self._await_all()
            if not self._waited.issuperset(self._order):
                self._missed()
        for saving in self._savings:
            saving.finish()
        if self._savings:
            # The next step may give the saved pages to another request from its beginning.
            # ends: on a GPU at once, as streams wait; on a CPU after copies in memory
            self._dock.streams.join()
        self._going += self._landings + self._savings
        self._landings, self._savings, self._is_layered = [], [], False
        self.take()

    def _missed(self):
        """Handles a layer that waited in earlier passes but not in this one. It may have computed without its loaded blocks."""
        missed = next(name for name in self._order if name not in self._waited)
        logger.error(
            "kvarts: a forward pass did not wait for the blocks of layer %s; the loads of this pass are reported to vLLM as failed, and from now on each pass "
            "waits for all layers before it begins (slower)",
            missed,
        )
        self._may_layer = False
        for landing in self._landings:
            self._unwaited.update(landing.slots)
        self.stats.add("dropped", sum(landing.blocks for landing in self._landings), "Unwaited")

    def take_unwaited(self):
        unwaited, self._unwaited = self._unwaited, set()
        return unwaited

    def take_landed(self):
        """Returns the requests whose loads have landed since the last call."""
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
            logger.warning("kvarts: the worker's side of the connector did not close in time: %s", error)
