//! The answers of one request on their way out, and the leases that travel with them.
use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use kv_transfer::Lease;
use proto::v1::PrefillResponse;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

/// What can be passed on. Dropped instead, it is given back.
pub(crate) trait HandOver {
    /// Passes it on to whoever has read the answer.
    fn hand_over(self);
}

impl HandOver for Lease {
    fn hand_over(self) {
        self.hand_over();
    }
}

/// One answer, and what its reader becomes responsible for.
#[derive(Debug)]
pub(crate) struct Answer<L> {
    pub(crate) response: PrefillResponse,
    pub(crate) leases: Vec<L>,
}

/// The stream that the transport reads. Leases are passed on when it has been read to its end; when
/// it is dropped before, because the reader has gone away, they are released.
#[derive(Debug)]
pub(crate) struct Answers<L> {
    answers: mpsc::Receiver<Result<Answer<L>, Status>>,
    /// Leases whose answer was read, but not the end behind it.
    held: Vec<L>,
}

impl<L> Answers<L> {
    pub(crate) fn new(answers: mpsc::Receiver<Result<Answer<L>, Status>>) -> Self {
        Self {
            answers,
            held: vec![],
        }
    }
}

impl<L: HandOver + Unpin> Stream for Answers<L> {
    type Item = Result<PrefillResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let answer = ready!(self.answers.poll_recv(context));
        Poll::Ready(match answer {
            Some(Ok(answer)) => {
                self.held.extend(answer.leases);
                Some(Ok(answer.response))
            }
            Some(Err(status)) => Some(Err(status)),
            None => {
                self.held.drain(..).for_each(HandOver::hand_over);
                None
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tokio_stream::StreamExt as _;

    use super::*;

    /// What became of each lease.
    type Log = Arc<Mutex<Vec<&'static str>>>;

    struct Fake(Option<Log>);

    impl HandOver for Fake {
        fn hand_over(mut self) {
            self.0.take().unwrap().lock().unwrap().push("passed on");
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            if let Some(log) = self.0.take() {
                log.lock().unwrap().push("released");
            }
        }
    }

    /// A stream whose only answer carries two leases.
    fn answered() -> (Log, Answers<Fake>) {
        let log = Log::default();
        let (tx, rx) = mpsc::channel(1);
        let answer = Answer {
            response: PrefillResponse::default(),
            leases: vec![Fake(Some(log.clone())), Fake(Some(log.clone()))],
        };
        assert!(tx.try_send(Ok(answer)).is_ok());
        (log, Answers::new(rx))
    }

    #[tokio::test]
    async fn leases_are_passed_on_when_the_stream_was_read_to_its_end() {
        let (log, mut answers) = answered();
        assert!(answers.next().await.unwrap().is_ok());
        assert!(log.lock().unwrap().is_empty());
        assert!(answers.next().await.is_none());
        drop(answers);
        assert_eq!(*log.lock().unwrap(), ["passed on", "passed on"]);
    }

    #[tokio::test]
    async fn leases_are_released_when_the_answer_was_never_read() {
        let (log, answers) = answered();
        drop(answers);
        assert_eq!(*log.lock().unwrap(), ["released", "released"]);
    }

    #[tokio::test]
    async fn leases_are_released_when_the_reader_goes_away_before_the_end() {
        let (log, mut answers) = answered();
        assert!(answers.next().await.unwrap().is_ok());
        drop(answers);
        assert_eq!(*log.lock().unwrap(), ["released", "released"]);
    }
}
