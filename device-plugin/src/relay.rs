//! Follows the plugin relay's own registration with the kubelet.

pub(crate) mod probe;

use std::path::{Path, PathBuf};
use std::time::Duration;

use bursar_kubelet::lifecycle::{NotRegistered, Registration};
use bursar_relay::state;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The interval at which the agent reads the relay's record, which is in memory.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// Returns a task that follows the relay in `dir`, and whether the kubelet follows the devices of
/// the resource `name` through it. `silent` is whether the relay leaves questions unanswered, and
/// `own` the agent's registration with it.
pub(crate) fn follow(
    dir: PathBuf,
    name: String,
    mut silent: watch::Receiver<bool>,
    mut own: watch::Receiver<Registration>,
    stop: CancellationToken,
) -> (impl Future<Output = ()>, watch::Receiver<Registration>) {
    let (sender, receiver) = watch::channel(own.borrow().clone());
    let task = async move {
        loop {
            let now = match *silent.borrow_and_update() {
                true => Registration::NotRegistered(NotRegistered::RelaySilent),
                false => with_kubelet(&dir, &name, own.borrow_and_update().clone()),
            };
            sender.send_if_modified(|published| {
                let changed = *published != now;
                *published = now;
                changed
            });
            tokio::select! {
                changed = own.changed() => if changed.is_err() {
                    // The lifecycle has ended, and has reported its end.
                    return stop.cancelled().await;
                },
                Ok(()) = silent.changed() => {}
                () = tokio::time::sleep(READ_INTERVAL) => {}
                () = stop.cancelled() => return,
            }
        }
    };
    (task, receiver)
}

/// The registration with the kubelet, by way of the relay.
fn with_kubelet(dir: &Path, name: &str, own: Registration) -> Registration {
    let problem = match own {
        Registration::Registered => match state::load_registrations(dir) {
            Ok(registrations) => match registrations.get(name) {
                Some(None) => return Registration::Registered,
                Some(Some(reason)) => reason.clone(),
                None => "the resource is not in its record".to_owned(),
            },
            Err(error) => error.to_string(),
        },
        Registration::NotRegistered(NotRegistered::NoKubelet(dir)) => {
            format!("no relay runs in {}", dir.display())
        }
        Registration::NotRegistered(_) => return own,
    };
    Registration::NotRegistered(NotRegistered::Relay(problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "bursar.dev/gpu-memory-gib";

    #[test]
    fn registration_needs_agent_relay_and_kubelet() {
        let dir = tempfile::tempdir().unwrap();
        let registered = || with_kubelet(dir.path(), NAME, Registration::Registered);
        let relay = |reason: &str| Registration::NotRegistered(NotRegistered::Relay(reason.into()));
        assert_eq!(registered(), relay("the resource is not in its record"));
        let save = |reason: Option<&str>| {
            let record = [(NAME.to_owned(), reason.map(str::to_owned))].into();
            state::save_registrations(dir.path(), &record).unwrap();
        };
        save(Some("no kubelet.sock"));
        assert_eq!(registered(), relay("no kubelet.sock"));
        save(None);
        assert_eq!(registered(), Registration::Registered);

        let own = |why| with_kubelet(dir.path(), NAME, Registration::NotRegistered(why));
        let why = NotRegistered::NoKubelet("/run/bursar/relay".into());
        assert_eq!(own(why), relay("no relay runs in /run/bursar/relay"));
        let starting = Registration::NotRegistered(NotRegistered::Starting);
        assert_eq!(own(NotRegistered::Starting), starting);
        std::fs::write(dir.path().join("registrations.json"), "{").unwrap();
        assert_ne!(
            registered(),
            Registration::Registered,
            "an unreadable record"
        );
    }
}
