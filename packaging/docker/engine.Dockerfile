# An engine's image with the connectors of Kvarts: scripts/wheel, then
# docker build -f packaging/docker/engine.Dockerfile --build-arg ENGINE=vllm/vllm-openai:v0.32.0 -t vllm-kvarts:0.32.0 .
# The engine must be a version that the connectors know (docs/engines.md). Not tried: no machine of this project runs containers.
ARG ENGINE
FROM ${ENGINE}
COPY dist/kvarts-*.whl /tmp/
# Nothing but the module: the engine's own packages stay as they are.
RUN python3 -m pip install --no-cache-dir --no-deps /tmp/kvarts-*.whl
