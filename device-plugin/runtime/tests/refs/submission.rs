//! Tests foreign work over several memories.

use std::time::{Duration, Instant};

use bursar_runtime::memory::submission::SubmitError;
use bursar_runtime::memory::write_token::WriteRefused;
use bursar_runtime::{DeviceMemoryResource as _, GpuRef, WriteToken, submit_in};
use bursar_sim_lab::{ONE_GPU, run_in_subprocess};

use crate::{runtime, slice, spin};

fn token(memory: &GpuRef<u32>) -> WriteToken {
    let lasts = Duration::from_secs(60);
    memory.begin_write(Instant::now(), lasts).unwrap()
}

#[test]
fn submission_is_ordered_with_the_uses_of_each_memory() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let [writing, copying, reading] = [(); 3].map(|()| runtime.stream().unwrap());
        let memory = || GpuRef::from(slice(&runtime, &[1], &writing));
        let (from, to) = (memory(), memory());
        let (to_from, to_to) = (token(&from), token(&to));
        from.write_in(&to_from, &writing, |_| spin(&writing))
            .unwrap();
        let memories = [from.arg(), to.arg_mut(&to_to).unwrap()];
        let addresses = submit_in(&copying, memories, |addresses| addresses).unwrap();
        assert_eq!(addresses, [from.as_raw(), to.as_raw()]);
        assert_eq!(copying.is_idle(), Ok(false));
        assert_eq!(to.last_write(), copying);
        to.read_in(&reading, |_| {}).unwrap();
        assert_eq!(reading.is_idle(), Ok(false));
    });
}

#[test]
fn submissions_in_opposite_order_do_not_deadlock() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let alloc_stream = runtime.stream().unwrap();
        let memory = || GpuRef::from(slice(&runtime, &[1], &alloc_stream));
        let (one, other) = (memory(), memory());
        std::thread::scope(|scope| {
            for pair in [[&one, &other], [&other, &one]] {
                let stream = runtime.stream().unwrap();
                scope.spawn(move || {
                    for _ in 0..1000 {
                        let memories = pair.map(|memory| memory.arg());
                        submit_in(&stream, memories, |_| {}).unwrap();
                    }
                });
            }
        });
    });
}

#[test]
fn refused_submission_leaves_no_open_use() {
    run_in_subprocess(ONE_GPU, |_| {
        let runtime = runtime(0);
        let [alloc_stream, other] = [(); 2].map(|()| runtime.stream().unwrap());
        let shared = GpuRef::from(slice(&runtime, &[1], &alloc_stream));
        let tracked = slice(&runtime, &[2], &alloc_stream);
        let memories = [shared.arg(), tracked.arg()];
        let refused = submit_in(&other, memories, |_| unreachable!("it is refused"));
        assert_eq!(refused, Err(SubmitError::WrongStream { index: 1 }));
        let token = token(&shared);
        let memories = [shared.arg_mut(&token).unwrap()];
        shared.fence_writer();
        let refused = submit_in(&other, memories, |_| unreachable!("it is fenced"));
        assert_eq!(refused, Err(SubmitError::Refused(WriteRefused::Fenced)));
        drop((shared, tracked));
        runtime.context().synchronize().unwrap();
        runtime.resource().reap_pending().unwrap();
        assert_eq!(runtime.resource().bytes_outstanding().total(), 0);
    });
}
