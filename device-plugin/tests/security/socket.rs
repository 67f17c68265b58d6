//! What processes do to their container's socket.

use crate::fixture::Node;

async fn sockets_that_linger(how: &str) {
    let node = Node::start().await;
    let tenant = node.tenant("hostile").await;
    let program = tenant.run(&node);
    let ((program, taken), seen) = node
        .under(program.load(&format!("linger 6 12 {how}")))
        .await;
    println!("{taken} taken");
    drop(program);
    node.holds(seen).await;
}

#[tokio::test]
async fn neighbour_is_answered_when_six_sockets_linger() {
    sockets_that_linger("plain").await;
}

#[tokio::test]
async fn neighbour_is_answered_when_six_sessions_linger() {
    sockets_that_linger("hello").await;
}
