"""Measures vLLM's prefill times from the steps of its scheduler."""


def measure(steps, requests, counts, waits=False):
    """Records a new step. `requests`: name -> scheduled request; `counts`: name -> tokens in the step; `waits`: whether the step waits for a
    load."""
    computed = {name: request.num_computed_tokens for name in counts if (request := requests.get(name)) is not None}
    left = lambda name: requests[name].num_prompt_tokens - computed[name] if name in computed else 0  # noqa: E731
    steps.begin(counts, computed.get, left, waits)


class Watch:
    """Measures the steps of an engine for a connector that does not track requests otherwise. Only the scheduler's thread may call it."""

    def __init__(self, steps):
        self._steps, self._requests = steps, {}

    def let_in(self, request):
        self._requests[request.request_id] = request

    def begin(self, counts):
        """Records a new step. Loads of this connector delay requests, and never a step."""
        measure(self._steps, self._requests, counts)

    def end(self):
        """Records that the oldest step has run."""
        self._steps.end()

    def over(self, request):
        if self._requests.pop(request.request_id, None) is not None:
            self._steps.forget(request.request_id)
