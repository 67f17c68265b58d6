//! Builds the client for the API server.

use std::time::Duration;

use kube::{Client, Config};

use crate::cluster::watches::READ_TIMEOUT;

/// A client for the pod's service account or `KUBECONFIG`.
pub async fn client() -> Result<Client, kube::Error> {
    let config = Config::infer().await.map_err(kube::Error::InferConfig)?;
    Client::try_from(client_config(config, READ_TIMEOUT))
}

/// Bounds the API server's silence within a response, so that no request waits for ever.
pub fn client_config(mut config: Config, silence: Duration) -> Config {
    config.read_timeout = Some(silence);
    config.reset_reader_on_write = true;
    // kube would wait the 10 s that a refused eviction suggests, and hide the refusal. Each caller
    // retries by itself.
    config.default_retry = false;
    config
}
