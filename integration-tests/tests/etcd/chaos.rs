//! Processes of every kind are killed under load, in the phase of a request that is named, and started again. Clients
//! send again what failed, to the other router. Every picture comes, each is the right one, nobody waits past its
//! deadline, and nothing is left at the routers.
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use base::{clock, task};
use proto::v1::{
    CancelRequest, GenerateRequest, LossPolicy, Member, Role, generate_response::Event,
    image_service_client::ImageServiceClient,
};
use rustix::process::Signal;
use tokio::sync::watch;
use tonic::{Code, Status};

use crate::{
    fleet::{Process, ready, registry, stage_at},
    harness::request,
    server::EtcdServer,
};

/// Deadline of one try, and of a client.
const TRY: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(240);
/// By when both routers must have found out that a process stands still.
const FOUND: Duration = Duration::from_secs(10);
/// Pause before a request is sent again.
const PAUSE: Duration = Duration::from_millis(200);
/// Steps of each picture.
const STEPS: u32 = 10;

/// How much happens.
#[derive(Debug, Clone, Copy)]
struct Scale {
    /// Clients at work.
    clients: usize,
    /// Different pictures.
    wishes: u64,
    /// The next one is killed only when the last one's successor is at work.
    whole: bool,
}

/// What CI has time for.
const SMALL: Scale = Scale {
    clients: 2,
    wishes: 1,
    whole: false,
};
const FULL: Scale = Scale {
    clients: 3,
    wishes: 3,
    whole: true,
};

/// Where a request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Prefill,
    Denoise,
    Decode,
}

/// What is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Router,
    Ar,
    Kv,
    Dit,
    Etcd,
    /// A worker that stands still: its sockets stay open and it says nothing. Then it is killed.
    Still,
}

/// Two of everything that may be there twice.
struct Park {
    etcd: EtcdServer,
    routers: [Process; 2],
    kv: Process,
    ars: [Process; 2],
    dits: [Process; 2],
    /// Where clients find the routers.
    doors: Arc<Mutex<[String; 2]>>,
    kills: usize,
}

impl Park {
    async fn start() -> Self {
        let etcd = EtcdServer::start();
        let registry = registry(&etcd);
        let join = ["--registry", registry.as_str()];
        let kv = Process::start("kv-transfer", &join);
        let stages = |role: &str| [(); 2].map(|()| stage_at(role, &registry, &kv.endpoint));
        let (ars, dits) = (stages("ar-stage"), stages("dit-worker"));
        let routers = [(); 2].map(|()| Process::start("router", &join));
        let doors = routers.each_ref().map(|router| router.endpoint.clone());
        let park = Self {
            etcd,
            routers,
            kv,
            ars,
            dits,
            doors: Arc::new(Mutex::new(doors)),
            kills: 0,
        };
        park.whole().await;
        park
    }

    /// Waits until both routers see everybody.
    async fn whole(&self) {
        let all = |members: &[Member]| {
            let two = |role| ready(members, role).len() == 2;
            two(Role::ArStage) && two(Role::DitWorker) && two(Role::Router)
        };
        for router in &self.routers {
            router.sees("everybody", all).await;
        }
    }

    /// Kills one of a kind, by turns, and starts another in its place.
    async fn kill(&mut self, kind: Kind) {
        let turn = self.kills % 2;
        self.kills += 1;
        let registry = registry(&self.etcd);
        let join = ["--registry", registry.as_str()];
        match kind {
            Kind::Etcd => {
                self.etcd.kill();
                self.etcd.restart();
            }
            Kind::Router => {
                self.routers[turn].signal(Signal::KILL);
                self.routers[turn].ended();
                self.routers[turn] = Process::start("router", &join);
                self.doors.lock().unwrap()[turn] = self.routers[turn].endpoint.clone();
            }
            Kind::Ar => {
                self.ars[turn].signal(Signal::KILL);
                self.ars[turn] = stage_at("ar-stage", &registry, &self.kv.endpoint);
            }
            Kind::Dit => {
                self.dits[turn].signal(Signal::KILL);
                self.dits[turn] = stage_at("dit-worker", &registry, &self.kv.endpoint);
            }
            Kind::Still => {
                self.dits[turn].signal(Signal::STOP);
                let one = |members: &[Member]| ready(members, Role::DitWorker).len() == 1;
                let found = async {
                    for router in &self.routers {
                        router.sees("one worker", one).await;
                    }
                };
                tokio::time::timeout(FOUND, found)
                    .await
                    .expect("a worker that stands still is not found");
                self.dits[turn].signal(Signal::KILL);
                self.dits[turn] = stage_at("dit-worker", &registry, &self.kv.endpoint);
            }
            Kind::Kv => {
                // Stages know it by its address.
                let at = self.kv.endpoint.replace("http://", "");
                self.kv.signal(Signal::KILL);
                self.kv.ended();
                self.kv = Process::start_at("kv-transfer", &at, &join);
            }
        }
    }
}

/// What the clients found.
#[derive(Debug, Default)]
struct Tally {
    done: AtomicUsize,
    again: AtomicUsize,
    wrong: Mutex<Vec<String>>,
    over: AtomicBool,
}

/// One client.
#[derive(Clone)]
struct Client {
    number: usize,
    wishes: u64,
    doors: Arc<Mutex<[String; 2]>>,
    right: Arc<Vec<Vec<u8>>>,
    tally: Arc<Tally>,
    phase: watch::Sender<Option<Phase>>,
}

fn wish(id: &str, which: u64) -> GenerateRequest {
    GenerateRequest {
        request_id: id.to_owned(),
        steps: Some(STEPS.cast_signed()),
        seed: Some(100 + which),
        on_prefix_loss: LossPolicy::Recompute.into(),
        ..request("a boat that nobody loses")
    }
}

impl Client {
    /// Draws until told that it is over.
    async fn work(self) {
        for turn in 0_u64.. {
            if self.tally.over.load(Ordering::Relaxed) {
                return;
            }
            let which = (turn + self.number as u64) % self.wishes;
            let id = format!("c{}-{turn}", self.number);
            let wrong = match self.until_done(&wish(&id, which)).await {
                Ok(png) if png == self.right[usize::try_from(which).unwrap()] => {
                    self.tally.done.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                Ok(_) => format!("{id} is another picture"),
                Err(lost) => format!("{id}: {lost}"),
            };
            self.tally.wrong.lock().unwrap().push(wrong);
        }
    }

    async fn until_done(&self, wish: &GenerateRequest) -> Result<Vec<u8>, String> {
        let began = clock::now();
        for attempt in self.number.. {
            let door = self.doors.lock().unwrap()[attempt % 2].clone();
            let tried = tokio::time::timeout(TRY * 2, self.once(&door, wish)).await;
            match tried {
                Err(_) => return Err("hangs past its deadline".to_owned()),
                Ok(Ok(png)) => return Ok(png),
                Ok(Err(status)) if !again(status.code()) => return Err(format!("{status:?}")),
                Ok(Err(status)) if clock::now() - began > PATIENCE => {
                    return Err(format!("is lost: {status:?}"));
                }
                Ok(Err(_)) => {}
            }
            self.tally.again.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(PAUSE).await;
        }
        unreachable!("attempts do not end")
    }

    async fn once(&self, door: &str, wish: &GenerateRequest) -> Result<Vec<u8>, Status> {
        let channel = proto::channel::lazy(door).unwrap();
        let mut client = ImageServiceClient::new(channel)
            .max_decoding_message_size(base::limits::MAX_RESPONSE_BYTES);
        let mut timed = tonic::Request::new(wish.clone());
        timed.set_timeout(TRY);
        let mut stream = client.generate(timed).await?.into_inner();
        let mut png = None;
        while let Some(message) = stream.message().await? {
            match message.event {
                Some(Event::Accepted(_)) => drop(self.phase.send(Some(Phase::Prefill))),
                Some(Event::Step(step)) => {
                    let last = step.step == STEPS;
                    let phase = if last { Phase::Decode } else { Phase::Denoise };
                    let _ = self.phase.send(Some(phase));
                }
                Some(Event::Image(image)) => png = Some(image.png),
                _ => {}
            }
        }
        png.ok_or_else(|| Status::unavailable("ended without a picture"))
    }
}

/// What may be sent again. Unknown and internal: what the transport makes of a connection that broke.
fn again(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable
            | Code::Aborted
            | Code::ResourceExhausted
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::Unknown
            | Code::Internal
    )
}

/// Kills each of `plan` in its phase while clients draw.
async fn survives(plan: &[(Kind, Phase)], scale: Scale) -> String {
    let mut park = Park::start().await;
    let (phase, _) = watch::channel(None);
    let tally = Arc::new(Tally::default());
    let client = |number, right| Client {
        number,
        wishes: scale.wishes,
        doors: park.doors.clone(),
        right,
        tally: tally.clone(),
        phase: phase.clone(),
    };
    let alone = client(0, Arc::default());
    let mut right = Vec::new();
    for which in 0..scale.wishes {
        let drawn = alone
            .until_done(&wish(&format!("right-{which}"), which))
            .await;
        right.push(drawn.unwrap());
    }
    let right = Arc::new(right);
    let clients: Vec<_> = (0..scale.clients)
        .map(|number| task::spawn(client(number, right.clone()).work()))
        .collect();
    for &(kind, at) in plan {
        let mut seen = phase.subscribe();
        seen.mark_unchanged();
        let there = async {
            while seen.changed().await.is_ok() && *seen.borrow_and_update() != Some(at) {}
        };
        tokio::time::timeout(TRY, there)
            .await
            .expect("nobody gets to that phase");
        let before = tally.done.load(Ordering::Relaxed);
        park.kill(kind).await;
        if scale.whole {
            park.whole().await;
        }
        // It goes on: as many pictures as there are clients come after it.
        let goes_on = async {
            while tally.done.load(Ordering::Relaxed) < before + scale.clients {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let went_on = tokio::time::timeout(PATIENCE, goes_on).await;
        let wrong = tally.wrong.lock().unwrap().clone();
        assert!(
            went_on.is_ok() && wrong.is_empty(),
            "{kind:?} in {at:?}: {wrong:?}"
        );
    }
    tally.over.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    let wrong = tally.wrong.lock().unwrap().clone();
    assert!(wrong.is_empty(), "{wrong:?}");
    idle(&park.routers).await;
    let done = tally.done.load(Ordering::Relaxed);
    let again = tally.again.load(Ordering::Relaxed);
    format!("{} kills: {done} pictures, {again} sent again", plan.len())
}

/// Nothing is left at the routers.
async fn idle(routers: &[Process]) {
    let empty = async {
        for router in routers {
            while router.metric("omni_router_running") > 0.5
                || router.metric("omni_router_queue_depth") > 0.5
            {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    tokio::time::timeout(TRY, empty)
        .await
        .expect("something is left");
}

#[tokio::test]
async fn a_process_of_every_kind_is_killed_under_load_and_no_picture_is_lost_or_wrong() {
    let plan = [
        (Kind::Dit, Phase::Denoise),
        (Kind::Ar, Phase::Prefill),
        (Kind::Router, Phase::Denoise),
        (Kind::Kv, Phase::Prefill),
        (Kind::Etcd, Phase::Decode),
    ];
    println!("{}", Box::pin(survives(&plan, SMALL)).await);
}

/// Both processes of a kind in every phase.
#[allow(clippy::print_stdout)]
async fn in_every_phase(kind: Kind) {
    let phases = [Phase::Prefill, Phase::Denoise, Phase::Decode];
    let plan: Vec<_> = phases.map(|phase| [(kind, phase); 2]).concat();
    println!("{kind:?}: {}", Box::pin(survives(&plan, FULL)).await);
}

macro_rules! in_every_phase {
    ($($name:ident: $kind:ident;)*) => {
        $(#[tokio::test]
        #[ignore = "minutes; `-- --ignored every_phase --test-threads 1`"]
        async fn $name() {
            in_every_phase(Kind::$kind).await;
        })*
    };
}

in_every_phase! {
    every_phase_survives_the_router: Router;
    every_phase_survives_the_ar_stage: Ar;
    every_phase_survives_the_kv_service: Kv;
    every_phase_survives_the_worker: Dit;
    every_phase_survives_a_worker_that_stands_still: Still;
    every_phase_survives_etcd: Etcd;
}

/// A request that is cancelled once it has done so many steps.
async fn cancelled(door: String, number: u64) {
    let channel = proto::channel::lazy(&door).unwrap();
    let mut client = ImageServiceClient::new(channel.clone());
    let id = format!("cancel-{number}");
    let request = GenerateRequest {
        steps: Some(40),
        ..wish(&id, number)
    };
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let at = base::rng::Source::seeded(number).below(20);
    loop {
        match stream.message().await {
            Ok(Some(message)) => match message.event {
                Some(Event::Step(step)) if u64::from(step.step) < at => continue,
                Some(Event::Accepted(_)) if at > 0 => continue,
                Some(Event::Queued(_)) => continue,
                _ => {}
            },
            other => panic!("{id} ended by itself: {other:?}"),
        }
        break;
    }
    // Half of them say so, half of them just leave.
    if number.is_multiple_of(2) {
        let request_id = id.clone();
        client.cancel(CancelRequest { request_id }).await.unwrap();
        while let Ok(Some(_)) = stream.message().await {}
    }
}

#[tokio::test]
#[ignore = "minutes; `-- --ignored cancels`"]
async fn a_hundred_cancels_at_random_steps_leave_nothing_and_touch_nobody() {
    let park = Park::start().await;
    let (phase, _) = watch::channel(None);
    let client = Client {
        number: 0,
        wishes: 1,
        doors: park.doors.clone(),
        right: Arc::default(),
        tally: Arc::default(),
        phase,
    };
    let right = client.until_done(&wish("right", 7)).await.unwrap();
    let doors = park.doors.lock().unwrap().clone();
    for round in 0..10_u64 {
        let many: Vec<_> = (0..10)
            .map(|n| task::spawn(cancelled(doors[(n % 2) as usize].clone(), round * 10 + n)))
            .collect();
        let beside = client
            .until_done(&wish(&format!("beside-{round}"), 7))
            .await;
        assert!(
            beside.unwrap() == right,
            "a picture beside the cancels is another one"
        );
        for one in many {
            one.await.unwrap();
        }
    }
    idle(&park.routers).await;
    let empty = |members: &[Member]| {
        let load = |m: &&Member| m.load.is_some_and(|load| load.running + load.queued > 0);
        !members.iter().any(|member| load(&member))
    };
    park.routers[0].sees("idle stages", empty).await;
    let leases = async {
        while park.kv.metric("omni_transfer_leases{state=\"live\"}") > 0.5 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(TRY, leases)
        .await
        .expect("a lease is left");
}
