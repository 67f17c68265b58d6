//! Builds the client for the API server.

use std::time::Duration;

use kube::{Client, Config};

use crate::cluster::watches::READ_TIMEOUT;

/// A client by the pod's service account or `KUBECONFIG`.
pub async fn client() -> Result<Client, kube::Error> {
    let config = Config::infer().await.map_err(kube::Error::InferConfig)?;
    Client::try_from(client_config(config, READ_TIMEOUT))
}

/// `config` with none of its requests waiting for ever: the API server may be silent for so long within an answer.
pub fn client_config(mut config: Config, silence: Duration) -> Config {
    config.read_timeout = Some(silence);
    config.reset_reader_on_write = true;
    // The library would wait the 10 s that an eviction's refusal asks for, and hide that it was refused. Everything
    // here is tried again by who wanted it.
    config.default_retry = false;
    config
}
