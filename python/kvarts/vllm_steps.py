"""How long vLLM computes prompts, by what its scheduler says of each step."""


def measure(steps, requests, counts, waits=False):
    """A step is made with so many tokens of each request. `requests`: those that were let in, by name; `waits`: whether it waits for a load."""
    computed = {name: request.num_computed_tokens for name in counts if (request := requests.get(name)) is not None}
    left = lambda name: requests[name].num_prompt_tokens - computed[name] if name in computed else 0  # noqa: E731
    steps.begin(counts, computed.get, left, waits)


class Watch:
    """Measures the steps of an engine whose connector does nothing else with its requests. All of it is of the scheduler's thread."""

    def __init__(self, steps):
        self._steps, self._requests = steps, {}

    def let_in(self, request):
        self._requests[request.request_id] = request

    def begin(self, counts):
        """A step is made; loads of this connector hold back requests, and no step."""
        measure(self._steps, self._requests, counts)

    def end(self):
        """The oldest step whose end was not told has run."""
        self._steps.end()

    def over(self, request):
        if self._requests.pop(request.request_id, None) is not None:
            self._steps.forget(request.request_id)
