//! Shows that peers with arbitrary messages harm only their own container.

use std::os::fd::AsFd;

use bursar_protocol::credit::CreditWord;
use bursar_protocol::fd_passing::send_with_fd;
use bursar_protocol::messages::{Account as OnWire, HeldCredit};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;

/// The connections of each hostile thread.
const CONVERSATIONS: u32 = 150;

/// The hostile threads, all of one container.
const THREADS: u64 = 4;

/// The time in which 99 of 100 round trips of a neighbour end. A neighbour that waited for a
/// hostile peer would take seconds. On a machine that runs other tests, a thread waits a good part
/// of this time to run.
const NEIGHBOUR_WITHIN: Duration = Duration::from_millis(500);

struct HostileInput(StdRng);

impl HostileInput {
    fn below(&mut self, sides: u64) -> u64 {
        self.0.random_range(0..sides)
    }

    /// A number of units, often at a limit of the range.
    fn units(&mut self) -> Units {
        let edges = [0, 1, 4096, 1 << 18, u32::MAX - 1];
        let number = match self.below(2) {
            0 => edges[self.below(5) as usize],
            _ => self.below(1 << 32) as u32,
        };
        Units(number).min(Units::MAX)
    }

    fn message(&mut self) -> Vec<u8> {
        let account = self.below(63) as u8;
        match self.below(5) {
            0 => Request::Hello {
                version: self.below(3) as u16,
                image: self.below(4),
                holdings: (0..self.below(4)).map(|_| self.holding()).collect(),
            },
            1 => Request::Credit {
                account: account % 3,
                units: self.units(),
            },
            2 => Request::Credit {
                account,
                units: Units::ZERO,
            },
            3 => Request::Denied {
                account,
                bytes: u64::MAX,
                function: "x".repeat(self.below(96) as usize),
            },
            _ => Request::Refresh,
        }
        .frame()
    }

    fn holding(&mut self) -> HeldCredit {
        let names = ["GPU-aaaa", "GPU-bbbb", ""];
        let name = names[self.below(3) as usize].to_owned();
        HeldCredit {
            account: OnWire::Device(name),
            granted: self.units(),
            used: self.units(),
        }
    }
}

/// Sends random messages on one connection.
fn run_hostile_peer(run_dir: &Path, rng: &mut HostileInput) {
    let (stream, page) = match rng.below(3) {
        0 => (connect(run_dir), None),
        _ => match try_hello(run_dir, rng.below(4)) {
            Some((stream, page)) => (stream, Some(page)),
            None => return,
        },
    };
    stream
        .set_write_timeout(Some(Duration::from_millis(20)))
        .unwrap();
    stream
        .set_read_timeout(Some(Duration::from_millis(1)))
        .unwrap();
    let mut peer = &stream;
    for _ in 0..rng.below(20) {
        // The agent may have closed the socket, or may read no further.
        let _ = match rng.below(8) {
            0 => peer.write_all(&[rng.below(256) as u8; 40]),
            1 => peer.write_all(&u16::MAX.to_le_bytes()),
            2 => {
                let message = rng.message();
                peer.write_all(&message[..rng.below(message.len() as u64) as usize])
            }
            3 => send_with_fd(&stream, &rng.message(), stream.as_fd()).map(drop),
            4 => stream.shutdown(std::net::Shutdown::Write),
            5 => peer.read(&mut [0; 4096]).map(drop),
            _ => peer.write_all(&rng.message()),
        };
        if let Some(slot) = page
            .as_ref()
            .and_then(|page| page.slot(rng.below(2) as usize))
        {
            let word = CreditWord {
                granted: rng.units().0,
                used: rng.units().0,
            };
            match rng.below(5) {
                0 => slot.set(word),
                1 => drop(slot.freeze()),
                2 => slot.set_exported(rng.units()),
                3 => slot.set_quota(rng.units()),
                _ => slot.set_others(rng.units(), word.used),
            }
        }
    }
}

fn try_hello(run_dir: &Path, image: u64) -> Option<(UnixStream, CreditPage)> {
    let mut stream = connect(run_dir);
    let hello = Request::Hello {
        version: 1,
        image,
        holdings: vec![],
    };
    stream.write_all(&hello.frame()).ok()?;
    let (_, page) = receive_with_fd(&stream, &mut [0; 4096]).ok()?;
    Some((stream, CreditPage::open(page?).ok()?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_peers_gain_nothing_and_delay_no_neighbour() {
    let (folder, next_door) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let sessions = sessions(folder.path(), true);
    sessions.serve(session_spec()).await.unwrap();
    let neighbours = self::sessions(next_door.path(), true);
    neighbours.serve(session_spec()).await.unwrap();
    let crowd: Vec<_> = (0..THREADS)
        .map(|seed| {
            let run_dir = folder.path().to_owned();
            tokio::task::spawn_blocking(move || {
                let mut rng = HostileInput(StdRng::seed_from_u64(seed));
                (0..CONVERSATIONS).for_each(|_| run_hostile_peer(&run_dir, &mut rng));
            })
        })
        .collect();
    let path = next_door.path().to_owned();
    let neighbour = tokio::task::spawn_blocking(move || {
        let (mut stream, _page) = hello(&path);
        let trip = |_| {
            std::thread::sleep(Duration::from_millis(2));
            let start = Instant::now();
            stream.write_all(&Request::Refresh.frame()).unwrap();
            assert_eq!(receive(&mut stream), Response::Refreshed);
            start.elapsed()
        };
        let mut times: Vec<Duration> = (0..300).map(trip).collect();
        times.sort();
        times[times.len() * 99 / 100]
    });
    while !crowd.iter().all(tokio::task::JoinHandle::is_finished) {
        let usage = sessions.container_usage().into_iter();
        for usage in usage.flat_map(|container| container.accounts) {
            assert!(
                usage.granted.0 + usage.exited.0 <= usage.quota.0,
                "{usage:?}"
            );
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for hostile in crowd {
        hostile.await.unwrap();
    }
    let most = neighbour.await.unwrap();
    assert!(
        most < NEIGHBOUR_WITHIN,
        "one in a hundred took more than {most:?}"
    );
    run_blocking(folder.path(), |run_dir| {
        let (mut stream, page) = hello_as(run_dir, 99);
        let all = Request::Credit {
            account: 0,
            units: page.slot(0).unwrap().quota(),
        };
        let start = Instant::now();
        loop {
            stream.write_all(&all.frame()).unwrap();
            match receive(&mut stream) {
                Response::Granted { .. } => break,
                answer => assert!(start.elapsed() < Duration::from_secs(5), "{answer:?}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    })
    .await;
}
