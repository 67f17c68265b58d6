use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use bursar_protocol::page::CreditPage;
use bursar_protocol::socket::receive_with_fd;
use bursar_protocol::units::Units;
use bursar_protocol::wire::{self, Message, Reason, ToAgent, ToShim};

use super::*;

/// Every process belongs to every pod, or none does.
struct Everyone(bool);

impl Membership for Everyone {
    fn process(&self, pid: u32) -> Option<Process> {
        Cgroups::new("/proc".into()).process(pid)
    }

    fn container(&self, _pid: u32, _pod: &PodUid) -> Option<String> {
        self.0.then(|| "here".to_owned())
    }
}

struct NothingCharged;

impl DriverCharges for NothingCharged {
    fn charged(&self, _gpu: &GpuUuid, _pid: u32) -> Option<Bytes> {
        Some(Bytes::ZERO)
    }
}

fn served() -> Served {
    Served {
        allocation: AllocationId::from_bits(7),
        pod: "8b2e3f0a-1f5c-4c41-9d53-0a5f4f7a9d11".parse().unwrap(),
        gpus: vec![("GPU-aaaa".parse().unwrap(), Bytes::gib(1))],
        managed: Bytes::ZERO,
    }
}

fn sessions(run_dir: &Path, members: bool) -> Sessions {
    Sessions::new(
        run_dir.to_owned(),
        Arc::new(NothingCharged),
        Arc::new(Everyone(members)),
    )
}

fn connect(run_dir: &Path) -> UnixStream {
    let socket = run_dir.join("alloc/0000000000000007/agent.sock");
    let stream = UnixStream::connect(socket).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    stream
}

fn receive(stream: &mut UnixStream) -> ToShim {
    let mut header = [0; wire::HEADER];
    stream.read_exact(&mut header).unwrap();
    let mut payload = vec![0; wire::payload_length(header).unwrap()];
    stream.read_exact(&mut payload).unwrap();
    ToShim::parse(&payload).unwrap()
}

fn hello(run_dir: &Path) -> (UnixStream, CreditPage) {
    let mut stream = connect(run_dir);
    stream
        .write_all(
            &ToAgent::Hello {
                version: 1,
                image: 1,
                holdings: vec![],
            }
            .frame(),
        )
        .unwrap();
    let mut bytes = [0; 4096];
    let (_, page) = receive_with_fd(&stream, &mut bytes).unwrap();
    (stream, CreditPage::open(page.unwrap()).unwrap())
}

fn is_served(run_dir: &Path) {
    let (mut stream, page) = hello(run_dir);
    stream
        .write_all(
            &ToAgent::Request {
                account: 0,
                units: Units(1),
            }
            .frame(),
        )
        .unwrap();
    assert!(matches!(
        receive(&mut stream),
        ToShim::Granted { account: 0, .. }
    ));
    assert!(page.slot(0).unwrap().charge(Units(1)).is_ok());
}

/// Runs the blocking side of a test beside the runtime that serves.
async fn beside(run_dir: &Path, test: impl FnOnce(&Path) + Send + 'static) {
    let run_dir = run_dir.to_owned();
    tokio::task::spawn_blocking(move || test(&run_dir))
        .await
        .unwrap();
}

#[tokio::test]
async fn any_user_of_the_container_can_connect() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    sessions.serve(served()).await.unwrap();
    sessions.serve(served()).await.unwrap();
    let alloc = folder.path().join("alloc/0000000000000007");
    assert_eq!(alloc.metadata().unwrap().mode() & 0o777, 0o755);
    assert_eq!(
        alloc.join("agent.sock").metadata().unwrap().mode() & 0o777,
        0o666
    );
    assert_eq!(std::fs::read_dir(&alloc).unwrap().count(), 1);
    beside(folder.path(), is_served).await;
    assert_eq!(sessions.usage()[0].processes, 1);
}

#[tokio::test]
async fn a_process_outside_the_container_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), false);
    sessions.serve(served()).await.unwrap();
    beside(folder.path(), |run_dir| {
        let mut stream = connect(run_dir);
        stream
            .write_all(
                &ToAgent::Hello {
                    version: 1,
                    image: 1,
                    holdings: vec![],
                }
                .frame(),
            )
            .unwrap();
        assert_eq!(
            receive(&mut stream),
            ToShim::Goodbye {
                reason: Reason::Identity
            }
        );
        let mut rest = [0; 1];
        assert_eq!(stream.read(&mut rest).unwrap(), 0);
    })
    .await;
}

#[tokio::test]
async fn garbage_silence_and_floods_of_one_peer_leave_the_next_one_served() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    sessions.serve(served()).await.unwrap();
    beside(folder.path(), |run_dir| {
        let silent: Vec<_> = (0..20).map(|_| connect(run_dir)).collect();
        for garbage in [
            &[0xff; 4096][..],
            &[0, 0],
            &[1, 0, 99],
            &[3, 0, 2, 0],
            b"GET / HTTP/1.1\r\n\r\n",
        ] {
            let mut stream = connect(run_dir);
            // The agent may have hung up before all of it was taken.
            let _ = stream.write_all(garbage);
            drop(stream);
        }
        let (mut flood, _page) = hello(run_dir);
        let request = ToAgent::Request {
            account: 62,
            units: Units(1),
        }
        .frame()
        .repeat(50_000);
        flood
            .set_write_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        // It reads no answer: the agent stops reading it, and only it.
        assert!(flood.write_all(&request).is_err());
        let begun = Instant::now();
        is_served(run_dir);
        assert!(
            begun.elapsed() < Duration::from_secs(1),
            "{:?}",
            begun.elapsed()
        );
        drop(silent);
    })
    .await;
}

#[tokio::test]
async fn an_agent_that_starts_again_serves_the_same_folder() {
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..3 {
        let sessions = sessions(folder.path(), true);
        sessions.serve(served()).await.unwrap();
        beside(folder.path(), is_served).await;
    }
}

#[tokio::test]
async fn an_allocation_that_ended_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let sessions = sessions(folder.path(), true);
    sessions.serve(served()).await.unwrap();
    beside(folder.path(), is_served).await;
    sessions.end(&AllocationId::from_bits(7)).await.unwrap();
    sessions.end(&AllocationId::from_bits(7)).await.unwrap();
    assert!(sessions.usage().is_empty());
    for left in ["alloc", "sessions"] {
        assert_eq!(
            std::fs::read_dir(folder.path().join(left)).unwrap().count(),
            0,
            "{left}"
        );
    }
    let quota = sessions.resize(&AllocationId::from_bits(7), &Account::Managed, Bytes::ZERO);
    assert!(matches!(quota, Err(SessionsError::Unknown(_))));
}
