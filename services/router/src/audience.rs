//! Who listens to a request: the client that sent it, and whoever sends the same again while it runs. A listener that
//! comes later is told what it missed, without steps that are past. The request runs for as long as one of them
//! listens.
//!
//! The first listener sets the pace: events wait for it. Others have a queue of their own; who falls behind it is
//! let go with a status that says so, and may come again.
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use base::{Code, Failure, limits::EVENT_QUEUE};
use futures_util::future::select_all;
use proto::{
    status::status,
    v1::{GenerateRequest, GenerateResponse, generate_response::Event},
};
use tokio::sync::{Notify, mpsc};
use tonic::Status;

use crate::{RouterError, dispatch::Answer};

/// Listeners of one request.
const MAX_LISTENERS: usize = 16;
/// How long a request may wait for the one of the same name that is just ending, and how often it looks.
pub(crate) const ENDING_WAIT: Duration = Duration::from_millis(500);
pub(crate) const ENDING_LOOK: Duration = Duration::from_millis(5);

/// Says whether two requests are the same one, sent twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Likeness {
    digest: blake3::Hash,
    tenant: String,
}

impl Likeness {
    pub(crate) fn new(request: &GenerateRequest, tenant: &str) -> Self {
        Self {
            digest: blake3::hash(&prost::Message::encode_to_vec(request)),
            tenant: tenant.to_owned(),
        }
    }
}

/// The listeners of one request. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Audience {
    state: Arc<Mutex<State>>,
    joined: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    /// What a listener that comes now has missed.
    told: Vec<GenerateResponse>,
    listeners: Vec<Listener>,
    /// Nobody can join any more.
    ended: bool,
}

#[derive(Debug)]
struct Listener {
    events: mpsc::Sender<Answer>,
    /// The last word always has a place, however slowly the listener reads.
    last: mpsc::OwnedPermit<Answer>,
}

impl Audience {
    /// With its first listener.
    ///
    /// # Errors
    /// Never in practice: the queue of a listener has room for its last word.
    pub(crate) fn open() -> Result<(Self, mpsc::Receiver<Answer>), RouterError> {
        let audience = Self {
            state: Arc::default(),
            joined: Arc::default(),
        };
        let answers = audience.join().ok_or(RouterError::Cancelled)?;
        Ok((audience, answers))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more listener. `None`: the request has ended, or has as many as it may have.
    pub(crate) fn join(&self) -> Option<mpsc::Receiver<Answer>> {
        let mut state = self.lock();
        if state.ended || state.listeners.len() >= MAX_LISTENERS {
            return None;
        }
        let (events, answers) = mpsc::channel(EVENT_QUEUE + state.told.len());
        let last = events.clone().try_reserve_owned().ok()?;
        for event in &state.told {
            events.try_send(Ok(event.clone())).ok()?;
        }
        state.listeners.push(Listener { events, last });
        self.joined.notify_one();
        Some(answers)
    }

    /// Tells everybody.
    ///
    /// # Errors
    /// Nobody listens.
    pub(crate) async fn send(&self, event: GenerateResponse) -> Result<(), RouterError> {
        let first = {
            let mut state = self.lock();
            state.listeners.retain(|l| !l.events.is_closed());
            state.note(&event);
            let Some(first) = state.listeners.first() else {
                return Err(RouterError::Cancelled);
            };
            let first = first.events.clone();
            state.tell_others(&event);
            first
        };
        // Gone meanwhile: whoever else listens has been told.
        let _ = first.send(Ok(event)).await;
        Ok(())
    }

    /// Waits until nobody listens; from then on nobody can join.
    pub(crate) async fn closed(&self) {
        loop {
            let senders: Vec<_> = {
                let mut state = self.lock();
                state.listeners.retain(|l| !l.events.is_closed());
                if state.listeners.is_empty() {
                    state.ended = true;
                    return;
                }
                state.listeners.iter().map(|l| l.events.clone()).collect()
            };
            let left = senders.iter().map(|sender| Box::pin(sender.closed()));
            tokio::select! {
                _ = select_all(left) => {}
                () = self.joined.notified() => {}
            }
        }
    }

    /// The last word; nobody can join any more.
    pub(crate) fn end(&self, last: &Answer) {
        let mut state = self.lock();
        state.ended = true;
        state.told.clear();
        for listener in state.listeners.drain(..) {
            listener.last.send(last.clone());
        }
    }
}

impl State {
    /// Keeps what a later listener needs: of steps and places in a queue the latest, of text all.
    fn note(&mut self, event: &GenerateResponse) {
        match &event.event {
            Some(Event::Step(step)) => {
                let index = step.index;
                self.told.retain(
                    |old| !matches!(&old.event, Some(Event::Step(step)) if step.index == index),
                );
            }
            Some(Event::Queued(_)) => {
                let queued = |old: &GenerateResponse| matches!(old.event, Some(Event::Queued(_)));
                self.told.retain(|old| !queued(old));
            }
            Some(Event::Text(delta)) => {
                if let Some(Event::Text(text)) =
                    self.told.last_mut().and_then(|old| old.event.as_mut())
                {
                    text.text.push_str(&delta.text);
                    return;
                }
            }
            _ => {}
        }
        self.told.push(event.clone());
    }

    /// Everybody but the first, who is waited for.
    fn tell_others(&mut self, event: &GenerateResponse) {
        let mut kept = Vec::with_capacity(self.listeners.len());
        for (place, listener) in self.listeners.drain(..).enumerate() {
            if place == 0 || listener.events.try_send(Ok(event.clone())).is_ok() {
                kept.push(listener);
            } else {
                listener.last.send(Err(behind()));
            }
        }
        self.listeners = kept;
    }
}

fn behind() -> Status {
    let message = "this client reads too slowly to follow a request that others follow as well";
    status(&Failure::new(Code::Unavailable, message))
}

/// The requests that may be joined, by their ids.
#[derive(Debug, Default)]
pub(crate) struct Audiences(Mutex<HashMap<String, (Likeness, Audience)>>);

/// What is found under an id.
pub(crate) enum Found {
    /// The same request runs.
    Joined(mpsc::Receiver<Answer>),
    /// The same request is about to end, or as many listen to it as may.
    Ending,
}

impl Audiences {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, (Likeness, Audience)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Joins the request of this id if it is the same, else runs `begin`, which nobody can come between.
    pub(crate) fn join_or<T>(
        &self,
        (id, likeness): (&str, &Likeness),
        begin: impl FnOnce() -> Result<(T, Audience), RouterError>,
    ) -> Result<Result<T, Found>, RouterError> {
        let mut table = self.lock();
        if let Some((running, audience)) = table.get(id)
            && running == likeness
        {
            let joined = audience.join();
            return Ok(Err(joined.map_or(Found::Ending, Found::Joined)));
        }
        let (begun, audience) = begin()?;
        table.insert(id.to_owned(), (likeness.clone(), audience));
        Ok(Ok(begun))
    }

    /// The request of this id ends: `end` runs before another one can take its place.
    pub(crate) fn end(&self, id: &str, end: impl FnOnce()) {
        let mut table = self.lock();
        table.remove(id);
        end();
    }
}

#[cfg(test)]
mod tests {
    use proto::v1::{Queued, StepDone, TextDelta};

    use super::*;

    fn step(index: u32, step: u32) -> GenerateResponse {
        let event = Event::Step(StepDone {
            step,
            steps: 9,
            index,
        });
        GenerateResponse { event: Some(event) }
    }

    fn text(text: &str) -> GenerateResponse {
        let event = Event::Text(TextDelta { text: text.into() });
        GenerateResponse { event: Some(event) }
    }

    async fn all(mut answers: mpsc::Receiver<Answer>) -> Vec<Answer> {
        let mut all = Vec::new();
        while let Some(answer) = answers.recv().await {
            all.push(answer);
        }
        all
    }

    #[tokio::test]
    async fn who_comes_later_is_told_what_it_missed_without_steps_that_are_past() {
        let (audience, first) = Audience::open().unwrap();
        let queued = GenerateResponse {
            event: Some(Event::Queued(Queued::default())),
        };
        for event in [queued.clone(), queued.clone(), text("a "), text("text")] {
            audience.send(event).await.unwrap();
        }
        for event in [step(0, 1), step(1, 1), step(0, 2)] {
            audience.send(event).await.unwrap();
        }
        let second = audience.join().unwrap();
        audience.send(step(0, 3)).await.unwrap();
        let last: Answer = Err(behind());
        audience.end(&last);
        assert_eq!(all(first).await.len(), 9);
        let told: Vec<_> = all(second).await;
        let events: Vec<_> = told.iter().flatten().cloned().collect();
        let wanted = [queued, text("a text"), step(1, 1), step(0, 2), step(0, 3)];
        assert_eq!(events, wanted);
        assert!(told.last().unwrap().is_err());
        assert!(audience.join().is_none());
    }

    #[tokio::test]
    async fn who_falls_behind_is_let_go_and_holds_nobody_up() {
        let (audience, mut first) = Audience::open().unwrap();
        let second = audience.join().unwrap();
        for number in 0..200 {
            audience.send(step(0, number)).await.unwrap();
            first.recv().await.unwrap().unwrap();
        }
        let told = all(second).await;
        assert!(told.len() <= EVENT_QUEUE + 1);
        let code = told.last().unwrap().as_ref().unwrap_err().code();
        assert_eq!(code, tonic::Code::Unavailable);
        assert_eq!(audience.lock().listeners.len(), 1);
    }

    #[tokio::test]
    async fn a_request_is_closed_when_the_last_of_its_listeners_has_left() {
        let (audience, first) = Audience::open().unwrap();
        let second = audience.join().unwrap();
        let waiting = audience.clone();
        let closed = base::task::spawn(async move { waiting.closed().await });
        drop(first);
        tokio::task::yield_now().await;
        audience.send(step(0, 1)).await.unwrap();
        assert!(!closed.is_finished());
        drop(second);
        tokio::time::timeout(Duration::from_secs(5), closed)
            .await
            .unwrap()
            .unwrap();
        assert!(audience.join().is_none());
    }
}
