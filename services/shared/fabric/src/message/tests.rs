use super::*;
use crate::{Context, Transport, Use, settings};

/// Turns of a loop that must come to an end.
const PATIENCE: usize = 10_000_000;

fn worker(transport: Transport) -> Rc<Worker> {
    let settings = settings(&[transport], None).unwrap();
    let context = Context::open(&settings, Use::Messages).unwrap();
    Worker::new(&Arc::new(context)).unwrap()
}

/// Turns both workers until `done` has a result.
fn until<T>(workers: [&Rc<Worker>; 2], mut done: impl FnMut() -> Option<T>) -> T {
    for _ in 0..PATIENCE {
        for worker in workers {
            worker.progress();
        }
        if let Some(result) = done() {
            return result;
        }
    }
    panic!("nothing came");
}

fn numbers(elements: usize) -> Arc<Vec<f32>> {
    Arc::new((0..elements).map(|i| i as f32).collect())
}

#[test]
fn short_and_long_bodies_arrive_whole() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let (a, b) = (worker(transport), worker(transport));
        let endpoint = Endpoint::connect(&a, &b.address().unwrap()).unwrap();
        for elements in [0, 1, 1000, 100_000, 4 << 20] {
            let data = numbers(elements);
            let body = (elements > 0).then(|| (Arc::clone(&data), 1..elements));
            let mut sending = Sending::post(&endpoint, b"head", body).unwrap();
            let arrived = until([&a, &b], || b.next_message());
            assert_eq!(arrived.header, b"head");
            let got = match arrived.body {
                Body::Here(got) => got,
                Body::Announced(announced) => {
                    assert_eq!(announced.elements(), elements - 1);
                    let mut receiving = announced.receive().unwrap();
                    until([&a, &b], || receiving.poll()).unwrap()
                }
                Body::Malformed => panic!("malformed"),
            };
            assert_eq!(got, data[elements.min(1)..], "{transport}");
            until([&a, &b], || sending.poll()).unwrap();
        }
        assert_eq!(endpoint.transports().unwrap(), [transport.ucx_name()]);
        let flushing = endpoint.flush().unwrap();
        until([&a, &b], || flushing.poll()).unwrap();
    }
}

#[test]
fn a_body_that_nobody_wants_is_let_go() {
    let (a, b) = (worker(Transport::Tcp), worker(Transport::Tcp));
    let endpoint = Endpoint::connect(&a, &b.address().unwrap()).unwrap();
    let body = (numbers(4 << 20), 0..4 << 20);
    let mut sending = Sending::post(&endpoint, b"head", Some(body)).unwrap();
    let arrived = until([&a, &b], || b.next_message());
    assert!(matches!(arrived.body, Body::Announced(_)));
    drop(arrived);
    until([&a, &b], || sending.poll()).unwrap();
}

#[test]
fn a_cut_connection_ends_what_runs_and_refuses_more() {
    let (a, b) = (worker(Transport::Tcp), worker(Transport::Tcp));
    let endpoint = Endpoint::connect(&a, &b.address().unwrap()).unwrap();
    let body = || Some((numbers(4 << 20), 0..4 << 20));
    let mut sending = Sending::post(&endpoint, b"head", body()).unwrap();
    endpoint.abort();
    assert!(until([&a, &b], || sending.poll()).is_err());
    assert!(Sending::post(&endpoint, b"head", body()).is_err());
}

#[test]
fn bad_headers_and_ranges_are_refused() {
    let (a, b) = (worker(Transport::Tcp), worker(Transport::Tcp));
    let endpoint = Endpoint::connect(&a, &b.address().unwrap()).unwrap();
    assert!(Sending::post(&endpoint, &[], None).is_err());
    assert!(Sending::post(&endpoint, &[0; MAX_HEADER_BYTES + 1], None).is_err());
    assert!(Sending::post(&endpoint, b"head", Some((numbers(3), 1..4))).is_err());
}
