# The images that the chart names: `docker build --target agent .` and `docker build --target operator .`
# The test harness writes the same layout from the same binaries (e2e/src/images).

FROM rust:1.95.0-bookworm@sha256:6258907abe69656e41cd992e0b705cdcfabcbbe3db374f92ed2d47121282d4a1 AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked \
      --package bursar-device-plugin --package bursar-operator \
      --package bursar-shim --package bursar-nvml-shim \
      --package bursar-fdstore --package bursar-provisioner

FROM debian:bookworm-slim@sha256:7b140f374b289a7c2befc338f42ebe6441b7ea838a042bbd5acbfca6ec875818 AS base
LABEL org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="Bursar"

FROM base AS agent
LABEL org.opencontainers.image.title="bursar-agent" \
      org.opencontainers.image.description="Binds containers to GPU memory, and holds them to it"
COPY --from=build /src/target/release/bursar-agent /src/target/release/bursar-fdstore \
     /src/target/release/bursar-provisioner /usr/local/bin/
# The agent copies them to the node, and containers get them from there: an upgrade of this image never
# touches a file that a program has mapped.
COPY --from=build /src/target/release/libbursar_shim.so /opt/bursar/shim/libcuda.so.1
COPY --from=build /src/target/release/libbursar_nvml_shim.so /opt/bursar/shim/libnvidia-ml.so.1
ENTRYPOINT ["/usr/local/bin/bursar-agent"]

FROM base AS operator
LABEL org.opencontainers.image.title="bursar-operator" \
      org.opencontainers.image.description="Keeps budgets of GPU memory in force, and places pods"
COPY --from=build /src/target/release/bursar-operator /usr/local/bin/bursar-operator
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/bursar-operator"]
