//! Who is in memory: places and bytes, handed out by class and then in order of arrival.
//!
//! A request whose prefixes are not here yet can only wait; so it is here, not in the batch, that an urgent one
//! would stand behind everybody who came before it. It goes before them, and finds a place of its own where the others
//! have all of theirs: it takes part in the next step, and one of them is parked.
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use stage::StageError;
use tokio::sync::oneshot;

use crate::batch::{Class, Terms};

/// Requests that may be in memory beyond everybody else's places, if they are urgent.
pub(crate) const URGENT_PLACES: usize = 2;

/// Places and bytes of a worker.
#[derive(Debug, Clone)]
pub(crate) struct Places(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Taken, the places of urgent requests included.
    taken: usize,
    places: usize,
    free: u64,
    /// By whose turn it is, and number of arrival.
    waiting: BTreeMap<(Instant, u64), Waiting>,
    came: u64,
}

#[derive(Debug)]
struct Waiting {
    bytes: u64,
    class: Class,
    answer: oneshot::Sender<Held>,
}

/// A place and its bytes; given back when dropped.
#[derive(Debug)]
pub(crate) struct Held {
    places: Places,
    bytes: u64,
}

impl State {
    fn fits(&self, bytes: u64, class: Class) -> bool {
        let extra = if class == Class::Interactive {
            URGENT_PLACES
        } else {
            0
        };
        self.taken < self.places + extra && bytes <= self.free
    }

    fn take(&mut self, bytes: u64) {
        self.taken += 1;
        self.free -= bytes;
    }

    /// Those whose turn it is now. Who is first and finds too little keeps the others from taking it.
    fn next(&mut self) -> Option<Waiting> {
        loop {
            let first = self.waiting.first_entry()?;
            let gone = first.get().answer.is_closed();
            let (bytes, class) = (first.get().bytes, first.get().class);
            if !gone && !self.fits(bytes, class) {
                return None;
            }
            let (_, waiting) = self.waiting.pop_first()?;
            if !gone {
                self.take(bytes);
                return Some(waiting);
            }
        }
    }
}

impl Places {
    /// `places` requests with `bytes` in all.
    pub(crate) fn new(places: usize, bytes: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            taken: 0,
            places,
            free: bytes,
            waiting: BTreeMap::new(),
            came: 0,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that nobody has.
    pub(crate) fn free(&self) -> u64 {
        self.state().free
    }

    /// A place with `bytes`, where there is one and nobody waits who comes first.
    pub(crate) fn try_take(&self, bytes: u64, terms: &Terms) -> Option<Held> {
        let mut state = self.state();
        let turn = turn(terms);
        let before = |((first, _), waiting): (&(Instant, u64), &Waiting)| {
            *first <= turn && !waiting.answer.is_closed()
        };
        if state.waiting.iter().any(before) || !state.fits(bytes, terms.class) {
            return None;
        }
        state.take(bytes);
        let places = self.clone();
        Some(Held { places, bytes })
    }

    /// Waits for a place with `bytes`, which must not be more than there are in all.
    ///
    /// # Errors
    /// `Draining`, which would be a defect: nobody is sent away.
    pub(crate) async fn take(&self, bytes: u64, terms: &Terms) -> Result<Held, StageError> {
        let (answer, answered) = oneshot::channel();
        {
            let mut state = self.state();
            state.came += 1;
            let key = (turn(terms), state.came);
            let class = terms.class;
            let waiting = Waiting {
                bytes,
                class,
                answer,
            };
            state.waiting.insert(key, waiting);
        }
        self.hand_out();
        answered.await.map_err(|_| StageError::Draining)
    }

    /// Answers everybody whose turn it is.
    fn hand_out(&self) {
        loop {
            let next = self.state().next();
            let Some(Waiting { bytes, answer, .. }) = next else {
                return;
            };
            let places = self.clone();
            // Who has left meanwhile gives back what it was handed, by dropping it.
            drop(answer.send(Held { places, bytes }));
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        {
            let mut state = self.places.state();
            state.taken -= 1;
            state.free += self.bytes;
        }
        self.places.hand_out();
    }
}

/// Seconds of waiting that count as one class, as in the router's queue.
const CLASS_S: f64 = 30.0;

/// Stands still, so that nobody waits for ever behind a class that is always there.
fn turn(terms: &Terms) -> Instant {
    let class = match terms.class {
        Class::Interactive => 0.0,
        Class::Standard => 1.0,
        Class::Background => 2.0,
    };
    terms.arrived + Duration::from_secs_f64(class * CLASS_S)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(class: Class) -> Terms {
        class.into()
    }

    /// One more who waits.
    async fn wait(places: &Places, class: Class, bytes: u64) -> base::task::Owned<Held> {
        let (own, came) = (places.clone(), places.state().came);
        let task = base::task::spawn(async move { own.take(bytes, &terms(class)).await.unwrap() });
        while places.state().came == came {
            tokio::task::yield_now().await;
        }
        task
    }

    /// As long as everybody who could be answered needs.
    async fn settle() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn an_urgent_request_finds_a_place_at_once_where_the_others_have_all_of_theirs() {
        let places = Places::new(2, 100);
        let background = terms(Class::Background);
        let held: Vec<Held> = (0..2)
            .map(|_| places.try_take(10, &background).unwrap())
            .collect();
        let mut queue = Vec::new();
        for _ in 0..20 {
            queue.push(wait(&places, Class::Background, 10).await);
        }
        let urgent = places.try_take(10, &terms(Class::Interactive)).unwrap();
        assert!(places.try_take(10, &terms(Class::Standard)).is_none());
        // Its place goes back, and is nobody else's.
        drop(urgent);
        settle().await;
        assert!(queue.iter().all(|one| !one.is_finished()));
        drop(held);
        let first: Vec<Held> = vec![
            queue.remove(0).await.unwrap(),
            queue.remove(0).await.unwrap(),
        ];
        assert_eq!((first.len(), places.free()), (2, 80));
    }

    #[tokio::test]
    async fn classes_come_in_order_and_who_lacks_bytes_is_not_overtaken() {
        let places = Places::new(9, 100);
        let all = places.try_take(100, &terms(Class::Standard)).unwrap();
        let low = wait(&places, Class::Background, 10).await;
        let large = wait(&places, Class::Standard, 90).await;
        let small = wait(&places, Class::Standard, 20).await;
        drop(all);
        let large = large.await.unwrap();
        assert_eq!(places.free(), 10);
        // The low one would fit; the small one comes first and does not yet.
        settle().await;
        assert!(!low.is_finished() && !small.is_finished());
        drop(large);
        let held = (small.await.unwrap(), low.await.unwrap());
        assert_eq!(places.free(), 70);
        drop(held);
        assert_eq!(places.free(), 100);
    }

    #[tokio::test]
    async fn who_leaves_the_line_keeps_nothing_and_holds_nobody_up() {
        let places = Places::new(1, 100);
        let held = places.try_take(10, &terms(Class::Standard)).unwrap();
        let (own, who) = (places.clone(), terms(Class::Standard));
        let mut gone = Box::pin(async move { own.take(100, &who).await });
        let polled = futures_util::poll!(gone.as_mut());
        assert!(polled.is_pending());
        drop(gone);
        let next = wait(&places, Class::Background, 50).await;
        drop(held);
        assert_eq!(next.await.unwrap().bytes, 50);
        assert_eq!(places.free(), 100);
    }

    #[test]
    fn an_old_request_of_a_low_class_comes_before_a_new_urgent_one() {
        let old = Terms::new(Class::Background, Duration::from_secs(61));
        assert!(turn(&old) < turn(&Terms::new(Class::Interactive, Duration::ZERO)));
    }
}
