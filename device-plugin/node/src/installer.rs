//! Installs the shim's files on a blocking thread, so that a disk that hangs delays no admission.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, timeout_at};

use super::host::HostError;
use crate::cdi;

/// The time for which the node task waits for one installation, in all.
const INSTALL_TIMEOUT: Duration = Duration::from_secs(2);

type InstallResult = Result<cdi::CdiNode, HostError>;

/// Keeps the installation that all CDI files share, and looks at the driver before each of them: a
/// package or a driver container may replace the driver's files at any time.
pub(super) struct Installer {
    /// Finds the driver, and installs the shim for it unless the installation before, its argument,
    /// is for this driver.
    install: Arc<dyn Fn(Option<cdi::CdiNode>) -> InstallResult + Send + Sync>,
    installed: Option<cdi::CdiNode>,
    /// The one installation that has not ended.
    running: Option<Installation>,
}

struct Installation {
    deadline: Instant,
    task: JoinHandle<InstallResult>,
}

impl Installer {
    pub(super) fn new(
        install: impl Fn(Option<cdi::CdiNode>) -> InstallResult + Send + Sync + 'static,
    ) -> Self {
        Self {
            install: Arc::new(install),
            installed: None,
            running: None,
        }
    }

    /// The present installation, or the one before where the present one does not end in time.
    pub(super) async fn installed(&mut self) -> Result<&cdi::CdiNode, HostError> {
        let mut running = self.running.take();
        if let Some(ended) = running.take_if(|running| running.task.is_finished()) {
            // The driver may have changed since.
            self.installed = ended.task.await.map_err(HostError::Install)?.ok();
        }
        let mut running = running.unwrap_or_else(|| self.start());
        match timeout_at(running.deadline, &mut running.task).await {
            Ok(ended) => {
                self.installed = None;
                self.installed = Some(ended.map_err(HostError::Install)??);
            }
            Err(_) => self.running = Some(running),
        }
        self.installed
            .as_ref()
            .ok_or(HostError::InstallTimeout(INSTALL_TIMEOUT))
    }

    fn start(&self) -> Installation {
        let install = Arc::clone(&self.install);
        let before = self.installed.clone();
        Installation {
            deadline: Instant::now() + INSTALL_TIMEOUT,
            task: spawn_blocking(move || install(before)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    use super::*;

    fn refused() -> InstallResult {
        Err(HostError::GpuNotListed("GPU-a".parse().unwrap()))
    }

    #[tokio::test]
    async fn installer_waits_once_for_an_installation_that_hangs() {
        let (release, blocked) = channel::<()>();
        let blocked = Mutex::new(blocked);
        let mut installer = Installer::new(move |_| {
            // Dropping the sender at the end of the test ends this thread.
            let _ = blocked.lock().unwrap().recv();
            refused()
        });
        let started = Instant::now();
        for _ in 0..100 {
            let late = installer.installed().await;
            assert!(matches!(late, Err(HostError::InstallTimeout(_))));
        }
        let waited = started.elapsed();
        assert!(
            waited >= INSTALL_TIMEOUT && waited < 50 * INSTALL_TIMEOUT,
            "{waited:?}"
        );
        drop(release);
        let ended = installer.running.take().unwrap().task.await.unwrap();
        assert!(matches!(ended, Err(HostError::GpuNotListed(_))));
    }
}
