//! Pools of streams.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::sync::Mutex;

use bursar_runtime::{Stale, StreamPool};
use bursar_sim_lab::{ONE_GPU, inside};

use crate::{runtime, spin};

const FOUR: NonZeroUsize = NonZeroUsize::new(4).unwrap();

#[test]
fn streams_come_in_turn_and_no_more_than_the_pool_has() {
    inside(ONE_GPU, |_| {
        let pool = StreamPool::new(&runtime(0), FOUR);
        let keys: Vec<_> = (0..8).map(|_| pool.next().unwrap().key()).collect();
        assert_eq!(keys[..4], keys[4..]);
        let different: BTreeSet<_> = keys.iter().collect();
        assert_eq!(different.len(), 4);
    });
}

#[test]
fn eight_threads_share_the_same_few() {
    inside(ONE_GPU, |_| {
        let pool = StreamPool::new(&runtime(0), FOUR);
        let seen = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..64 {
                        let key = pool.next().unwrap().key();
                        seen.lock().unwrap().push(key);
                    }
                });
            }
        });
        let seen = seen.into_inner().unwrap();
        let different: BTreeSet<_> = seen.iter().collect();
        let each = different
            .iter()
            .map(|key| seen.iter().filter(|other| *other == *key).count());
        assert_eq!(each.collect::<Vec<_>>(), [128; 4]);
    });
}

#[test]
fn all_are_waited_for_and_a_stopped_runtime_gives_none() {
    inside(ONE_GPU, |_| {
        let runtime = runtime(0);
        let pool = StreamPool::new(&runtime, FOUR);
        let streams = [(); 2].map(|()| pool.next().unwrap());
        spin(&streams[1]);
        pool.synchronize().unwrap();
        assert_eq!(streams[1].is_idle(), Ok(true));
        runtime.shut_down();
        assert_eq!(pool.next().unwrap_err(), Stale::ShutDown.into());
    });
}
