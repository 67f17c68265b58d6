//! Holds a pod's namespaces open. It is the first process of the pod's sandbox, so the kernel gives
//! it no signal but SIGKILL, by which the container runtime ends it.

fn main() {
    loop {
        std::thread::park();
    }
}
