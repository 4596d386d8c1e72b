# An engine's image with the connectors of Kvarts: scripts/wheel, then
# docker build -f packaging/docker/engine.Dockerfile --build-arg ENGINE=vllm/vllm-openai:v0.32.0 -t vllm-kvarts:0.32.0 .
# The engine must have a version that was tested with the connectors (docs/engines.md). This file was not tried: no machine of this project runs containers.
ARG ENGINE
FROM ${ENGINE}
COPY dist/kvarts-*.whl /tmp/
# Installs only the module, so that the engine's own packages do not change.
RUN python3 -m pip install --no-cache-dir --no-deps /tmp/kvarts-*.whl
