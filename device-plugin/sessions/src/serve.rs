//! Starts and ends the session socket of each allocation.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use bursar_host::checkpoint::aside_paths;
use bursar_host::clock;
use bursar_ledger::units::{AllocationId, GpuUuid};

use crate::checkpoint::SessionCheckpoint;
use crate::closer::SocketCloser;
use crate::container::siblings::ClaimSiblings;
use crate::container::{Container, RestoredProcess};
use crate::stream::Listener;
use crate::{
    RunningContainer, SessionSpec, Sessions, SessionsError, checkpoint, listener, lock, reclaim,
};

impl Sessions {
    /// Starts to serve an allocation; a served allocation stays unchanged. After a restart the
    /// agent charges the processes in the checkpoint at once.
    ///
    /// # Errors
    /// [`SessionsError::Serve`] when the agent cannot create the folder or the socket.
    pub async fn serve(&self, spec: SessionSpec) -> Result<(), SessionsError> {
        let allocation = spec.allocation;
        if lock(&self.shared.containers).contains_key(&allocation) {
            return Ok(());
        }
        if spec.gpus.len() >= bursar_protocol::credit_page::MAX_SLOTS {
            return Err(SessionsError::TooManyGpus {
                allocation,
                gpus: spec.gpus.len(),
            });
        }
        let folder = self.allocation_dir(&allocation);
        let socket = folder.join(bursar_protocol::SOCKET_NAME);
        let served_before = socket.exists();
        let closer = SocketCloser::new(allocation);
        let listener = bind_listener(
            &folder,
            &socket,
            Arc::clone(&closer),
            self.refuses_descriptors,
        );
        let listener = listener.map_err(|source| SessionsError::Serve {
            path: socket.clone(),
            source,
        })?;
        let record =
            SessionCheckpoint::open(self.checkpoint_path(&allocation)).map_err(|source| {
                SessionsError::Serve {
                    path: self.checkpoint_path(&allocation),
                    source,
                }
            })?;
        let (container, restored) =
            self.restore_container(spec, record, served_before, Arc::clone(&closer));
        let gpus: Vec<_> = container.memory().gpus().cloned().collect();
        let container = Arc::new(Mutex::new(container));
        let task = listener::ListenerTask {
            container: Arc::clone(&container),
            shared_sampler: Arc::clone(&self.shared.shared_sampler),
            resolver: Arc::clone(&self.resolver),
            connection_limit: self.connection_limit.clone(),
            fault_notifier: self.fault_notifier.clone(),
            lease_service: self.lease_service.clone(),
            closer,
            log_limiter: self.log_limiter.clone(),
        };
        let task = tokio::spawn(task.run(listener, restored)).abort_handle();
        // When two calls serve the same allocation at once, the later listener has replaced the
        // earlier socket, so the later entry stays.
        lock(&self.shared.containers).insert(allocation, RunningContainer { container, task });
        // The task of a GPU that no container uses may be ending, so the agent lists the container
        // first.
        gpus.into_iter().for_each(|gpu| self.start_reclaim(gpu));
        Ok(())
    }

    /// Restores a container from its checkpoint, with the settings of these sessions.
    fn restore_container(
        &self,
        spec: SessionSpec,
        record: SessionCheckpoint,
        served_before: bool,
        closer: Arc<SocketCloser>,
    ) -> (Container, Vec<RestoredProcess>) {
        let siblings = self.claim_siblings(&spec);
        let (mut container, restored) = Container::restore(
            spec,
            record,
            served_before,
            self.resolver.as_ref(),
            clock::now(),
        );
        if let Some(sizes) = &self.context_sizes {
            container.memory_mut().set_context_sizes(Arc::clone(sizes));
        }
        if !served_before {
            container.set_policy(self.default_policy);
        }
        let max_free_pages = self.connection_limit.max_free_pages();
        container
            .memory_mut()
            .pages_mut()
            .set_max_free(max_free_pages);
        let orphans_changed = self.shared.orphans_changed.clone();
        container.connect(closer, orphans_changed, self.log_limiter.clone());
        if let Some(siblings) = siblings {
            container.memory_mut().join_claim(siblings);
        }
        (container, restored)
    }

    /// The containers with the same claim as `spec`; none where the claim is unknown.
    fn claim_siblings(&self, spec: &SessionSpec) -> Option<ClaimSiblings> {
        let device_ids = spec.device_ids.clone()?;
        let mut claims = lock(&self.siblings_by_claim);
        claims.retain(|_, siblings| !siblings.is_unshared());
        let claim = claims.entry((spec.pod.clone(), device_ids)).or_default();
        Some(claim.clone())
    }

    /// Stops serving an allocation whose pod has ended, and removes its files. An allocation that
    /// is not served needs nothing.
    ///
    /// # Errors
    /// [`SessionsError::Remove`] when the agent cannot remove the folder.
    pub async fn remove(&self, allocation: &AllocationId) -> Result<(), SessionsError> {
        let ended = lock(&self.shared.containers).remove(allocation);
        if let Some(running) = &ended {
            lock(&running.container).close();
        }
        drop(ended);
        self.shared.orphans_changed.send_replace(());
        let record = self.checkpoint_path(allocation);
        let written = [
            self.allocation_dir(allocation),
            checkpoint::temporary_path(&record),
        ];
        for path in written
            .into_iter()
            .chain(aside_paths(&record))
            .chain([record.clone()])
        {
            let removed = if path.is_dir() {
                std::fs::remove_dir_all(&path)
            } else {
                std::fs::remove_file(&path)
            };
            match removed {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(SessionsError::Remove { path, source });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Starts the reclaim task of a GPU, which runs while a container uses the GPU or exited
    /// processes left memory there.
    pub(super) fn start_reclaim(&self, gpu: GpuUuid) {
        if lock(&self.shared.gpus_with_task).insert(gpu.clone()) {
            let mut tasks = lock(&self.reclaim_tasks);
            while tasks.try_join_next().is_some() {}
            tasks.spawn(reclaim::run(gpu, Arc::clone(&self.shared)));
        }
        self.shared.orphans_changed.send_replace(());
    }

    pub(super) fn allocation_dir(&self, allocation: &AllocationId) -> PathBuf {
        Sessions::alloc_dir(&self.run_dir).join(allocation.to_string())
    }

    pub(super) fn checkpoint_path(&self, allocation: &AllocationId) -> PathBuf {
        self.run_dir
            .join("sessions")
            .join(format!("{allocation}.json"))
    }
}

/// Creates the socket for any user of the container, since the agent identifies a peer by its
/// cgroup.
fn bind_listener(
    folder: &Path,
    socket: &Path,
    closer: Arc<SocketCloser>,
    refuse_descriptors: bool,
) -> io::Result<Listener> {
    use std::os::unix::fs::PermissionsExt;
    let mode =
        |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode));
    std::fs::create_dir_all(folder)?;
    mode(folder, 0o755)?;
    // The agent binds another name and renames it, so that a shim that connects always finds a
    // served socket or the old one.
    let fresh = folder.join(".agent.sock.new");
    match std::fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = Listener::bind(&fresh, closer, refuse_descriptors)?;
    mode(&fresh, 0o666)?;
    std::fs::rename(&fresh, socket)?;
    Ok(listener)
}
