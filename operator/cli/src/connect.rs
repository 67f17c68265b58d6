//! Connects to the API server as kubectl would.

use std::net::IpAddr;

use anyhow::Context as _;
use http::{HeaderName, HeaderValue, Uri};
use hyper_util::client::proxy::matcher::Matcher;
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
    let kubeconfig = match &global.kubeconfig {
        Some(path) => Kubeconfig::read_from(path)
            .with_context(|| format!("failed to read kubeconfig {}", path.display()))?,
        // The branches below say why it cannot be read, or do without.
        None => Kubeconfig::read().unwrap_or_default(),
    };
    let of_cluster = cluster_proxy(&kubeconfig, global.context.as_deref());
    let mut config = match &global.kubeconfig {
        Some(_) => Config::from_custom_kubeconfig(kubeconfig, &options).await?,
        None if global.context.is_some() => Config::from_kubeconfig(&options).await?,
        None => Config::infer()
            .await
            .context("failed to find a cluster: set KUBECONFIG")?,
    };
    config.headers.extend(impersonation(global)?);
    let variable = |name: &str| std::env::var(name).ok();
    let proxy = of_cluster.or_else(|| environment_proxy(&config.cluster_url, variable));
    let proxy = proxy.map(|proxy| proxy.parse::<Uri>()).transpose();
    config.proxy_url = proxy.context("failed to parse the URL of the proxy")?;
    Ok(Client::try_from(config)?)
}

/// The `proxy-url` of a context's cluster. It holds whatever `NO_PROXY` says, as in kubectl.
fn cluster_proxy(kubeconfig: &Kubeconfig, context: Option<&str>) -> Option<String> {
    let context = context.or(kubeconfig.current_context.as_deref())?;
    let mut contexts = kubeconfig.contexts.iter();
    let context = contexts.find(|named| named.name == context)?;
    let cluster = &context.context.as_ref()?.cluster;
    let mut clusters = kubeconfig.clusters.iter();
    let cluster = clusters.find(|named| named.name == *cluster)?;
    let proxy = cluster.cluster.as_ref()?.proxy_url.clone();
    proxy.filter(|proxy| !proxy.is_empty())
}

/// The proxy that the environment names for a server. kube compares `NO_PROXY` with the proxy's own
/// address, so this program compares it with the server's.
///
/// Source: `golang.org/x/net/http/httpproxy`, which kubectl uses.
fn environment_proxy(server: &Uri, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let either = |name: &str| {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        set(name).or_else(|| set(&name.to_lowercase()))
    };
    let proxy = match server.scheme_str() {
        Some("https") => either("HTTPS_PROXY")?,
        _ => either("HTTP_PROXY")?,
    };
    let host = server.host()?.trim_matches(['[', ']']);
    let is_loopback = |address: IpAddr| address.is_loopback();
    if host == "localhost" || host.parse().is_ok_and(is_loopback) {
        return None;
    }
    let exempt = either("NO_PROXY").unwrap_or_default();
    if exempt.split(',').any(|entry| entry.trim() == "*") {
        return None;
    }
    // The matcher knows `.example.org`, and not the form with an asterisk.
    let exempt = exempt.replace("*.", ".");
    let matcher = Matcher::builder().all("http://proxy").no(exempt).build();
    matcher.intercept(server)?;
    Some(match proxy.contains("://") {
        true => proxy,
        false => format!("http://{proxy}"),
    })
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

    #[tokio::test]
    async fn proxy_of_the_cluster_is_used() {
        let folder = tempfile::tempdir().unwrap();
        for scheme in ["http", "https", "socks5"] {
            let file = folder.path().join(scheme);
            let config = format!(
                "{{ current-context: c, contexts: [{{ name: c, context: {{ cluster: c }} }}],
                   clusters: [{{ name: c, cluster: {{ server: 'https://10.0.0.1:6443', proxy-url: '{scheme}://p:3128' }} }}] }}"
            );
            std::fs::write(&file, &config).unwrap();
            let kubeconfig = Kubeconfig::from_yaml(&config).unwrap();
            let proxy = cluster_proxy(&kubeconfig, None);
            assert_eq!(proxy, Some(format!("{scheme}://p:3128")));
            assert_eq!(cluster_proxy(&kubeconfig, Some("other")), None);
            let global = Global {
                kubeconfig: Some(file),
                ..Global::default()
            };
            let client = connect(&global).await;
            assert!(client.is_ok(), "{:#}", client.err().unwrap());
        }
    }

    #[test]
    fn proxy_of_the_environment_spares_exempt_servers() {
        let of = |server: &'static str, no_proxy: &str| {
            let variable = |name: &str| match name {
                "https_proxy" => Some("p:3128".to_owned()),
                "NO_PROXY" => Some(no_proxy.to_owned()),
                _ => None,
            };
            environment_proxy(&Uri::from_static(server), variable)
        };
        let proxy = Some("http://p:3128".to_owned());
        let server = "https://10.1.2.3:6443";
        assert_eq!(of(server, ""), proxy);
        assert_eq!(of(server, "p, 192.168.0.0/16"), proxy);
        assert_eq!(of("https://api.example.org", "example.com"), proxy);
        for (server, no_proxy) in [
            (server, "*"),
            (server, "127.0.0.1, 10.0.0.0/8"),
            ("https://api.example.org", ".example.org"),
            ("https://api.example.org", "*.example.org"),
            ("https://127.0.0.1:6443", ""),
            ("https://[::1]:6443", ""),
            ("https://localhost:6443", ""),
            ("http://10.1.2.3", ""),
        ] {
            assert_eq!(of(server, no_proxy), None, "{server} {no_proxy}");
        }
    }

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
