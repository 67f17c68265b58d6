//! Tests the client with fd stores of other versions.

use std::os::unix::net::UnixListener;

use super::*;

const TIMEOUT: Duration = Duration::from_secs(10);

/// Starts an fd store of another version, which gives these answers. Returns its socket and the
/// messages that it gets, each with the number of its connection.
fn start_store_of_another_version(
    folder: &tempfile::TempDir,
    answer: impl Fn(&FdStoreRequest) -> FdStoreResponse + Send + 'static,
) -> (PathBuf, Receiver<(usize, FdStoreRequest)>) {
    let socket = folder.path().join("fdstore.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let (messages, receiver) = channel();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let stream = stream.unwrap();
            while let Ok((message, _)) = receive_message::<FdStoreRequest>(&stream) {
                let answer = answer(&message);
                if messages.send((number, message)).is_err() {
                    return;
                }
                send_message(&stream, &answer, None).unwrap();
            }
        }
    });
    (socket, receiver)
}

fn ready(version: u16) -> FdStoreResponse {
    FdStoreResponse::Ready {
        version,
        leases: 0,
        room: 9,
    }
}

fn hello() -> FdStoreRequest {
    FdStoreRequest::Hello { version: VERSION }
}

async fn connected(events: &mut mpsc::UnboundedReceiver<StoreEvent>) -> Connection {
    match tokio::time::timeout(TIMEOUT, events.recv()).await {
        Ok(Some(StoreEvent::Connected { connection, .. })) => connection,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn message_that_the_stores_version_lacks_is_not_sent() {
    let (calls, queue) = channel();
    let connection = Connection {
        number: 1,
        version: 1,
        calls,
    };
    let unknown = FdStoreError::Refused(Refusal::Unknown);
    let blob = Blob::default;
    let fd = rustix::pipe::pipe().unwrap().0;
    let put = connection.put(LeaseId(1), blob(), fd);
    let put = tokio::time::timeout(TIMEOUT, put).await;
    assert_eq!(put.expect("no wait").err(), Some(unknown));
    let update = connection.update(LeaseId(1), blob()).await;
    assert_eq!(update, Err(unknown));
    assert_eq!(connection.get(LeaseId(1)).await.err(), Some(unknown));
    assert_eq!(connection.close(LeaseId(1)).await, Err(unknown));
    assert!(queue.try_recv().is_err(), "nothing was queued");
}

#[test]
fn store_of_an_earlier_version_is_greeted_and_asked_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, messages) = start_store_of_another_version(&folder, |_| ready(1));
    let mut events = start(socket).unwrap();
    for _ in 0..2 {
        assert_eq!(messages.recv_timeout(TIMEOUT).unwrap().1, hello());
    }
    assert!(events.try_recv().is_err());
}

#[tokio::test]
async fn store_of_a_later_version_speaks_the_agents() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, _messages) = start_store_of_another_version(&folder, |message| match message {
        FdStoreRequest::Hello { .. } => ready(VERSION + 1),
        _ => FdStoreResponse::Listed { leases: vec![] },
    });
    let connection = connected(&mut start(socket).unwrap()).await;
    assert_eq!(connection.version, VERSION);
}

#[tokio::test]
async fn connection_outlives_a_message_that_the_store_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, messages) = start_store_of_another_version(&folder, |message| match message {
        FdStoreRequest::Hello { version } => ready(*version),
        FdStoreRequest::List { .. } => FdStoreResponse::Listed { leases: vec![] },
        FdStoreRequest::Drop { .. } => FdStoreResponse::Dropped,
        _ => FdStoreResponse::Refused(Refusal::Unknown),
    });
    let mut events = start(socket).unwrap();
    let connection = connected(&mut events).await;
    let refused = connection.update(LeaseId(1), Blob::default()).await;
    assert_eq!(refused, Err(FdStoreError::Refused(Refusal::Unknown)));
    assert_eq!(connection.close(LeaseId(1)).await, Ok(()));
    let numbers: Vec<usize> = messages.try_iter().map(|(number, _)| number).collect();
    assert_eq!(numbers, [0; 4], "one connection");
}
