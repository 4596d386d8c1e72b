"""The terms of requests for their chunks in vLLM's Kvarts tier: whether chunks are stored, their time to live, and how long they are pinned.

vLLM notifies a tier of a request with its `kv_transfer_params`, of the look-ups and stores for the request, and of its end.
"""

from collections import deque
from types import SimpleNamespace

import kvarts

from .link import logger, reason_of
from .pins import Pins
from .vllm_compat import get_offload_block_hash, get_offload_group_idx, keys_of
from .vllm_terms import Terms, complain, terms_of

#: The terms of a request without `kv_transfer_params`.
_PLAIN = Terms()


class Request:
    """A request with terms. `storing`: the number of its stores under way."""

    def __init__(self, terms):
        self.terms, self.keys = terms, {}
        self.storing, self.is_over = 0, False


class Requests:
    """The requests with terms. `hold(keys, seconds)` is called for a request with `pin` after it has ended and all of its stores have ended."""

    def __init__(self, hold):
        self._hold, self._known = hold, {}

    def begin(self, context):
        terms = terms_of(context)
        if terms.session is not None:
            complain("kv_transfer_params: session: the field has no effect with the connector Kvarts; use the connector KvartsLayers for sessions")
        if terms.ttl is not None or terms.pin is not None or terms.skip_save:
            self._known[context.req_id] = Request(terms)

    def terms_of(self, context):
        request = self._known.get(context.req_id)
        return _PLAIN if request is None else request.terms

    def storing(self, context, keys):
        """Records a store that begins; returns the argument for `stored`."""
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
        """Records the end of a request. `asked`: the chunks that it looked up."""
        request = self._known.pop(context.req_id, None)
        if request is None:
            return
        request.is_over = True
        # In the order of the prompt, as far as vLLM reports it.
        request.keys = {**dict.fromkeys(keys_of(context)), **dict.fromkeys(asked), **request.keys}
        self._hold_stored(request)

    def _hold_stored(self, request):
        if request.is_over and not request.storing and request.terms.pin is not None and request.keys:
            keys, request.keys = list(request.keys), {}
            self._hold(keys, request.terms.pin)


class Held:
    """Pinned chunks, by group, because a lease of the store covers one group. Only the link's thread may call the methods, except `take`."""

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
                raise  # all groups have failed
            except kvarts.Error as error:
                told.append((0, len(own), reason_of(error)))
        self._told.extend(told)

    def failed(self, keys, error):
        """Records that no chunk could be pinned."""
        if not isinstance(error, kvarts.Error):
            logger.error("kvarts: %d chunks could not be pinned because of a defect in Kvarts; report it: %s", len(keys), error)
        self._told.append((0, len(keys), reason_of(error)))

    def take(self):
        """Yields (pinned, not pinned, reason) for each pin since the last call."""
        while self._told:
            yield self._told.popleft()


class _Column:
    """The part of a handle that `Pins` uses, for one group. Its chunks need not be consecutive."""

    def __init__(self, pages, group):
        self._pages, self._group = pages, group

    def match(self, keys, hold):
        lease = self._pages.pin(keys, hold=hold, group=self._group)
        return SimpleNamespace(blocks=lease.blocks, lease=lease if lease.blocks else None)
