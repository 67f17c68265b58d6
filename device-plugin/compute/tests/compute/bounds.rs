//! Which time the holder takes, whatever tenants do.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bursar_sim_kernel::fuse::{Folder, Handler};
use bursar_sim_lab::DriverClient;

use crate::fixture::{FakeAgent, Lab, near, pod, wait_until};

/// The clients of a tenant that has very many, and the most calls of a look at them. The holder
/// asks 64 of them about each handle of libcuda's, and each control file about each new client.
const CROWD: usize = 200;
const MAX_CALLS: u64 = 400_000;

/// Answers nothing more once a file is open: each close of it waits for ever.
struct Hanging;

impl Handler for Hanging {
    const HANGS_ON_CLOSE: bool = true;

    fn ioctl(&mut self, _: u64, _: u32, _: u32, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn release(&mut self, _: u64) {}
}

/// A tenant's file system. Dropped, it ends, and so does what waits for it.
struct TenantFiles {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    server: Option<JoinHandle<io::Result<()>>>,
}

impl TenantFiles {
    fn mount() -> TenantFiles {
        let folder = Folder::mount("nvidiactl").unwrap();
        let (path, stop) = (folder.file(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let server = thread::spawn(move || folder.serve(&mut Hanging, &stopped));
        TenantFiles {
            path,
            stop,
            server: Some(server),
        }
    }
}

impl Drop for TenantFiles {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let _ = self.server.take().map(JoinHandle::join);
    }
}

/// Opens a tenant's file and holds both tenants to their parts.
fn hold_beside_a_file(lab: &mut Lab, client: &mut DriverClient, path: &str) {
    client.request(&format!("rm-file {path}")).unwrap();
    let links = std::fs::read_dir(format!("/proc/{}/fd", client.pid())).unwrap();
    let links = links.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    assert!(links.filter(|link| link.ends_with("nvidiactl")).count() > 2);
    let other = lab.busy();
    let (one, two) = (client.pid(), other.pid());
    let mut agent = FakeAgent::start(lab);
    let begun = Instant::now();
    let report = agent.order(&[pod("a", Some(80), &[one]), pod("b", Some(20), &[two])]);
    println!("a look beside {path}: {:?}", begun.elapsed());
    assert_eq!((report.pods["a"].groups, report.pods["b"].groups), (1, 1));
    let part = lab.part(&[one], || agent.mark_active(&[one, two]));
    assert!(near(part, 0.8), "{part}");
}

#[test]
fn tenants_file_like_the_control_node_hinders_nothing() {
    let mut lab = Lab::new();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nvidiactl");
    std::fs::write(&path, b"").unwrap();
    let mut client = lab.busy();
    hold_beside_a_file(&mut lab, &mut client, path.to_str().unwrap());
    std::fs::remove_file(&path).unwrap();
    let _socket = UnixListener::bind(&path).unwrap();
    hold_beside_a_file(&mut lab, &mut client, path.to_str().unwrap());
}

#[test]
fn tenants_file_that_hangs_on_close_hinders_nothing() {
    let mut lab = Lab::new();
    // The tenant's own end waits for its file system, which ends before.
    let mut client = lab.busy();
    let files = TenantFiles::mount();
    hold_beside_a_file(&mut lab, &mut client, files.path.to_str().unwrap());
}

#[test]
fn many_descriptors_and_clients_take_a_bounded_time() {
    let mut lab = Lab::new();
    let (mut crowd, other) = (lab.busy(), lab.busy());
    let (one, two) = (crowd.pid(), other.pid());
    let pods = [pod("a", Some(50), &[one]), pod("b", Some(50), &[two])];
    let mut agent = FakeAgent::start(&lab);
    agent.order(&pods);
    let clients = lab.module.clients().unwrap();
    crowd.request(&format!("rm-clients {CROWD}")).unwrap();
    assert_eq!(lab.module.clients().unwrap(), clients + CROWD);
    let begun = (
        Instant::now(),
        agent.processor_time(),
        lab.module.calls().unwrap(),
    );
    let report = agent.order(&pods);
    let calls = lab.module.calls().unwrap() - begun.2;
    println!(
        "a look at {CROWD} new clients of one process: {calls} calls, {:?}, of which {:?} the holder's",
        begun.0.elapsed(),
        agent.processor_time() - begun.1,
    );
    assert_eq!(report.pods["b"].groups, 1);
    // A driver carries out a million calls in 3 s.
    assert!(calls < MAX_CALLS, "{calls} calls");
    let before = lab.module.calls().unwrap();
    agent.order(&pods);
    let calls = lab.module.calls().unwrap() - before;
    assert!(calls < 100, "{calls} calls without a change");
    let part = lab.part(&[one], || agent.mark_active(&[one, two]));
    assert!(near(part, 0.5), "{part}");
}

#[test]
fn hundred_busy_groups_take_little_of_the_holders_time() {
    let mut lab = Lab::new();
    let mut clients: Vec<DriverClient> = (0..10).map(|_| lab.busy()).collect();
    for client in &mut clients {
        for _ in 0..9 {
            client.request("new-context 0").unwrap();
            client.request("launch spin 0").unwrap();
        }
    }
    let pids: Vec<u32> = clients.iter().map(DriverClient::pid).collect();
    let pods: Vec<_> = pids
        .iter()
        .map(|pid| pod(&pid.to_string(), Some(10), &[*pid]))
        .collect();
    let mut agent = FakeAgent::start(&lab);
    let begun = Instant::now();
    agent.find(&pods, &[10; 10]);
    println!("all groups are found: {:?}", begun.elapsed());
    agent.mark_active(&pids);
    wait_until(|| lab.slice(pids[0]) == 200);
    let before = (agent.processor_time(), lab.module.calls().unwrap());
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        agent.mark_active(&pids);
        thread::sleep(Duration::from_millis(100));
    }
    let seconds = begun.elapsed().as_secs_f64();
    let used = (agent.processor_time() - before.0).as_secs_f64() / seconds;
    let calls = (lab.module.calls().unwrap() - before.1) as f64 / seconds;
    println!(
        "the holder of 100 busy groups takes {:.2} % of a core for {calls:.0} calls a second",
        used * 100.0
    );
    // Each group at each 10 ms, which is the most.
    assert!(calls < 11_000.0, "{calls} calls a second");
}
