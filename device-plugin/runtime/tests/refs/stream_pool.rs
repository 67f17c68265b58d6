//! Tests pools of streams.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::Mutex;

use bursar_runtime::{StaleReason, StreamPool};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::{runtime, spin};

const FOUR: NonZeroUsize = NonZeroUsize::new(4).unwrap();

#[test]
fn stream_pool_is_round_robin_and_bounded() {
    run_in_subprocess(ONE_GPU, |_| {
        let pool = StreamPool::new(&runtime(0), FOUR);
        let keys: Vec<_> = (0..8).map(|_| pool.next().unwrap().key()).collect();
        assert_eq!(keys[..4], keys[4..]);
        let different: BTreeSet<_> = keys.iter().collect();
        assert_eq!(different.len(), 4);
    });
}

#[test]
fn eight_threads_share_the_streams_of_a_pool() {
    run_in_subprocess(ONE_GPU, |_| {
        let pool = StreamPool::new(&runtime(0), FOUR);
        let keys = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..64 {
                        let key = pool.next().unwrap().key();
                        keys.lock().unwrap().push(key);
                    }
                });
            }
        });
        let keys = keys.into_inner().unwrap();
        let different: BTreeSet<_> = keys.iter().collect();
        let each = different
            .iter()
            .map(|key| keys.iter().filter(|other| *other == *key).count());
        assert_eq!(each.collect::<Vec<_>>(), [128; 4]);
    });
}

#[test]
fn stream_pool_synchronizes_all_and_ends_with_the_runtime() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let pool = StreamPool::new(&runtime, FOUR);
        let streams = [(); 2].map(|()| pool.next().unwrap());
        spin(&streams[1]);
        pool.synchronize().unwrap();
        assert_eq!(streams[1].is_idle(), Ok(true));
        runtime.shut_down();
        assert_eq!(pool.next().unwrap_err(), StaleReason::ShutDown.into());
    });
}
