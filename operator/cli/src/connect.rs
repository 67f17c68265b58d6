//! Connects to the API server as kubectl would.

use anyhow::Context as _;
use http::{HeaderName, HeaderValue};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::args::Global;

/// A client for the user's context.
///
/// # Errors
/// When there is no usable kubeconfig.
pub async fn connect(global: &Global) -> anyhow::Result<Client> {
    let options = KubeConfigOptions {
        context: global.context.clone(),
        ..KubeConfigOptions::default()
    };
    let mut config = match &global.kubeconfig {
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path)
                .with_context(|| format!("failed to read kubeconfig {}", path.display()))?;
            Config::from_custom_kubeconfig(kubeconfig, &options).await?
        }
        None if global.context.is_some() => Config::from_kubeconfig(&options).await?,
        None => Config::infer()
            .await
            .context("failed to find a cluster: set KUBECONFIG")?,
    };
    config.headers.extend(impersonation(global)?);
    Ok(Client::try_from(config)?)
}

/// The headers of `--as` and `--as-group`.
fn impersonation(global: &Global) -> anyhow::Result<Vec<(HeaderName, HeaderValue)>> {
    let header = |name: &'static str, value: &String| {
        let value = HeaderValue::from_str(value)
            .with_context(|| format!("failed to impersonate {value}: no valid name"))?;
        Ok((HeaderName::from_static(name), value))
    };
    let user = global
        .as_user
        .iter()
        .map(|user| header("impersonate-user", user));
    let groups = global
        .as_group
        .iter()
        .map(|group| header("impersonate-group", group));
    user.chain(groups).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impersonation_is_sent_as_headers() {
        let global = Global {
            as_user: Some("alice".to_owned()),
            as_group: vec!["ml".to_owned(), "dev".to_owned()],
            ..Global::default()
        };
        let headers = impersonation(&global).unwrap();
        let names: Vec<_> = headers
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        assert_eq!(
            names,
            [
                "impersonate-user: alice",
                "impersonate-group: ml",
                "impersonate-group: dev"
            ]
        );
        let wrong = Global {
            as_user: Some("a\nb".to_owned()),
            ..Global::default()
        };
        assert!(impersonation(&wrong).is_err());
    }
}
