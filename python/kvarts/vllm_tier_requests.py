"""What requests say of the chunks that vLLM's Kvarts tier stores for them: whether it does, how long they live, and how long they are held.

vLLM tells a tier of a request with its `kv_transfer_params`, of the chunks that it looks for and stores for it, and of its end.
"""

from collections import deque
from types import SimpleNamespace

import kvarts

from .link import logger, reason_of
from .pins import Pins
from .vllm_compat import get_offload_block_hash, get_offload_group_idx, keys_of
from .vllm_terms import Terms, complain, terms_of

#: Of a request that says nothing.
_PLAIN = Terms()


class Request:
    """A request of which something is said. `storing`: how many of its stores are under way."""

    def __init__(self, terms):
        self.terms, self.keys = terms, {}
        self.storing, self.is_over = 0, False


class Requests:
    """`hold(keys, seconds)`: is called once a request is over that wants its chunks held, and all of them are stored that will be."""

    def __init__(self, hold):
        self._hold, self._known = hold, {}

    def begin(self, context):
        terms = terms_of(context)
        if terms.session is not None:
            complain("kv_transfer_params: session: it has no effect with the connector Kvarts; KvartsLayers has sessions")
        if terms.ttl is not None or terms.pin is not None or terms.skip_save:
            self._known[context.req_id] = Request(terms)

    def terms_of(self, context):
        request = self._known.get(context.req_id)
        return _PLAIN if request is None else request.terms

    def storing(self, context, keys):
        """A store begins; what `stored` takes."""
        request = self._known.get(context.req_id)
        if request is not None:
            request.storing += 1
            request.keys.update(dict.fromkeys(keys))
        return request

    def stored(self, request):
        if request is not None:
            request.storing -= 1
            self._hold_stored(request)

    def end(self, context, asked):
        """It is over. `asked`: chunks that it looked for."""
        request = self._known.pop(context.req_id, None)
        if request is None:
            return
        request.is_over = True
        # In the order of the prompt, as far as vLLM says it.
        request.keys = {**dict.fromkeys(keys_of(context)), **dict.fromkeys(asked), **request.keys}
        self._hold_stored(request)

    def _hold_stored(self, request):
        if request.is_over and not request.storing and request.terms.pin is not None and request.keys:
            keys, request.keys = list(request.keys), {}
            self._hold(keys, request.terms.pin)


class Held:
    """Chunks that are held against eviction: by group, because a lease of the store has one. All but `take` is of the link's thread."""

    def __init__(self):
        self._pins, self._told = {}, deque()

    def hold(self, pages, keys, seconds):
        by_group, told = {}, []
        for key in keys:
            by_group.setdefault(get_offload_group_idx(key), []).append(get_offload_block_hash(key))
        for group, own in by_group.items():
            try:
                held = self._pins.setdefault(group, Pins()).hold(_Column(pages, group), own, seconds)
                told.append((held, len(own) - held, "NotHere"))
            except (kvarts.Retry, kvarts.Deadline):
                raise  # all of them have failed
            except kvarts.Error as error:
                told.append((0, len(own), reason_of(error)))
        self._told.extend(told)

    def failed(self, keys, error):
        """Nothing was asked."""
        if not isinstance(error, kvarts.Error):
            logger.error("kvarts: %d chunks are not held: %s", len(keys), error)
        self._told.append((0, len(keys), reason_of(error)))

    def take(self):
        """(held, not held, why not) of each that was asked for since the last call."""
        while self._told:
            yield self._told.popleft()


class _Column:
    """What a chain's lease needs of a handle: of one group, whose chunks need not follow each other."""

    def __init__(self, pages, group):
        self._pages, self._group = pages, group

    def match(self, keys, hold):
        lease = self._pages.pin(keys, hold=hold, group=self._group)
        return SimpleNamespace(blocks=lease.blocks, lease=lease if lease.blocks else None)
