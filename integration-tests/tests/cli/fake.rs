//! A router that acts by the prompt it gets, and remembers what it was asked.
use std::sync::{Arc, Mutex};

use base::{Code, Failure, task};
use proto::v1::{
    Accepted, CancelRequest, CancelResponse, CordonRequest, CordonResponse, Done, DrainRequest,
    DrainResponse, GenerateRequest, GenerateResponse, GetRequest, GetResponse, GetVersionRequest,
    GetVersionResponse, Image, ListMembersRequest, ListMembersResponse, ListRequestsRequest,
    ListRequestsResponse, Queued, StepDone, Timings, WatchEventsRequest, WatchEventsResponse,
    admin_service_server::{AdminService, AdminServiceServer},
    generate_response::Event,
    get_response::State,
    image_service_server::{ImageService, ImageServiceServer},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::scene;

/// The bytes the fake calls a PNG; omnictl must write exactly these.
pub(crate) const PNG: &[u8] = b"\x89PNG\r\n\x1a\nnot really a picture";

/// What the fake was asked.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) generated: Vec<GenerateRequest>,
    pub(crate) cancelled: Vec<String>,
    pub(crate) drained: Vec<String>,
    pub(crate) cordoned: Vec<(String, bool)>,
}

/// A running fake; dropped, it stops.
pub(crate) struct Fake {
    pub(crate) endpoint: String,
    pub(crate) seen: Arc<Mutex<Seen>>,
    _server: task::Owned<()>,
}

impl Fake {
    pub(crate) async fn start() -> Self {
        let seen = Arc::<Mutex<Seen>>::default();
        let listener = proto::server::bind("127.0.0.1:0", "listen").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (mut routes, _health) =
            proto::server::routes(&[proto::names::IMAGE, proto::names::ADMIN])
                .await
                .unwrap();
        let service = Service(Arc::clone(&seen));
        routes
            .add_service(ImageServiceServer::new(service.clone()))
            .add_service(AdminServiceServer::new(service));
        let server = task::spawn(async move {
            proto::server::serve(listener, routes, std::future::pending())
                .await
                .unwrap();
        });
        Self {
            endpoint,
            seen,
            _server: server,
        }
    }
}

#[derive(Debug, Clone)]
struct Service(Arc<Mutex<Seen>>);

type Sender = mpsc::Sender<Result<GenerateResponse, Status>>;

async fn send(sender: &Sender, event: Event) {
    // A client that went away is part of the tests.
    let _ = sender
        .send(Ok(GenerateResponse { event: Some(event) }))
        .await;
}

fn accepted(request: &GenerateRequest) -> Accepted {
    Accepted {
        request_id: request.request_id.clone(),
        model: "fake".to_owned(),
        width: 256,
        height: 192,
        seed: request.seed.unwrap_or(4711),
        steps: 2,
        guidance: 5.0,
        cost: 2,
        ..Accepted::default()
    }
}

fn step(step: u32) -> StepDone {
    StepDone {
        step,
        steps: 2,
        index: 0,
    }
}

async fn act(request: GenerateRequest, sender: Sender) {
    send(&sender, Event::Accepted(accepted(&request))).await;
    send(
        &sender,
        Event::Queued(Queued {
            ahead: 1,
            stage: "ar-stage".to_owned(),
        }),
    )
    .await;
    send(&sender, Event::Step(step(1))).await;
    match request.prompt.as_str() {
        "cut" => return,
        "slow" => return sender.closed().await,
        "lost" => {
            let lost = Failure::new(Code::Unavailable, "dit-worker left");
            let _ = sender.send(Err(proto::status::status(&lost))).await;
            return;
        }
        _ => {}
    }
    send(&sender, Event::Step(step(2))).await;
    let image = Image {
        index: 0,
        width: 256,
        height: 192,
        png: PNG.to_vec(),
        ..Image::default()
    };
    send(&sender, Event::Image(image)).await;
    let timings = Timings {
        total_ms: 12.0,
        transport: "posix".to_owned(),
        ..Default::default()
    };
    send(
        &sender,
        Event::Done(Done {
            timings: Some(timings),
            ..Done::default()
        }),
    )
    .await;
}

#[tonic::async_trait]
impl ImageService for Service {
    type GenerateStream = ReceiverStream<Result<GenerateResponse, Status>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        self.0.lock().unwrap().generated.push(request.clone());
        if request.prompt == "busy" {
            return Err(proto::status::status(&Failure::new(
                Code::Unavailable,
                "no dit-worker",
            )));
        }
        if request
            .steps
            .is_some_and(|steps| !(1..=200).contains(&steps))
        {
            return Err(proto::status::status(&Failure::invalid(
                "steps",
                "must be 1 to 200",
            )));
        }
        let (sender, receiver) = mpsc::channel(8);
        drop(base::task::Tracker::new().spawn(act(request, sender)));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn cancel(
        &self,
        request: Request<CancelRequest>,
    ) -> Result<Response<CancelResponse>, Status> {
        let id = request.into_inner().request_id;
        let cancelled = id != "ended";
        self.0.lock().unwrap().cancelled.push(id);
        Ok(Response::new(CancelResponse { cancelled }))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        if request.into_inner().request_id == "unknown" {
            return Err(proto::status::status(&Failure::new(
                Code::NotFound,
                "no such request",
            )));
        }
        let step = 1;
        Ok(Response::new(GetResponse {
            state: State::Denoise.into(),
            step,
            ..Default::default()
        }))
    }
}

#[tonic::async_trait]
impl AdminService for Service {
    async fn get_version(
        &self,
        _: Request<GetVersionRequest>,
    ) -> Result<Response<GetVersionResponse>, Status> {
        Ok(Response::new(GetVersionResponse {
            version: "9.9.9".to_owned(),
            git_sha: "abc".to_owned(),
            profile: "debug".to_owned(),
            ..Default::default()
        }))
    }

    async fn list_members(
        &self,
        _: Request<ListMembersRequest>,
    ) -> Result<Response<ListMembersResponse>, Status> {
        Ok(Response::new(ListMembersResponse {
            members: scene::members(),
            epoch: 3,
            plans: vec![scene::plan()],
            following: true,
            ..Default::default()
        }))
    }

    async fn drain(
        &self,
        request: Request<DrainRequest>,
    ) -> Result<Response<DrainResponse>, Status> {
        self.0
            .lock()
            .unwrap()
            .drained
            .push(request.into_inner().member_id);
        Ok(Response::new(DrainResponse {}))
    }

    async fn cordon(
        &self,
        request: Request<CordonRequest>,
    ) -> Result<Response<CordonResponse>, Status> {
        let CordonRequest {
            member_id,
            cordoned,
        } = request.into_inner();
        let mut seen = self.0.lock().unwrap();
        seen.cordoned.push((member_id, cordoned));
        Ok(Response::new(CordonResponse {}))
    }

    async fn list_requests(
        &self,
        request: Request<ListRequestsRequest>,
    ) -> Result<Response<ListRequestsResponse>, Status> {
        let ask = request.into_inner();
        let mut requests = scene::records();
        for id in &ask.request_ids {
            if !requests.iter().any(|record| record.request_id == *id) {
                let unknown =
                    Failure::new(Code::NotFound, format!("no request {id:?} is known here"));
                return Err(proto::status::status(&unknown));
            }
        }
        if !ask.request_ids.is_empty() {
            requests.retain(|record| ask.request_ids.contains(&record.request_id));
        }
        if !ask.full {
            for record in &mut requests {
                record.placements.clear();
                record.spans.clear();
            }
        }
        Ok(Response::new(ListRequestsResponse { requests }))
    }

    type WatchEventsStream = ReceiverStream<Result<WatchEventsResponse, Status>>;

    async fn watch_events(
        &self,
        request: Request<WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let after = request.into_inner().after;
        let (sender, receiver) = mpsc::channel(8);
        for event in scene::events()
            .into_iter()
            .filter(|event| event.number > after)
        {
            let told = WatchEventsResponse { event: Some(event) };
            sender.try_send(Ok(told)).unwrap();
        }
        Ok(Response::new(ReceiverStream::new(receiver)))
    }
}
