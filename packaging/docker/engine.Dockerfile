# An engine's image with the connectors of Kvarts. First build the wheel with scripts/wheel, then run
# docker build -f packaging/docker/engine.Dockerfile --build-arg ENGINE=vllm/vllm-openai:v0.32.0 -t vllm-kvarts:0.32.0 .
# The version of the engine must be one that was tested with the connectors (docs/engines.md). No image was built from this file yet.
ARG ENGINE
FROM ${ENGINE}
COPY dist/kvarts-*.whl /tmp/
# Installs only this wheel and no dependencies, so that the packages of the engine do not change.
RUN python3 -m pip install --no-cache-dir --no-deps /tmp/kvarts-*.whl
