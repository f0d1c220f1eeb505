//! A KV-transfer service without bytes: it keeps books on leases.
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use base::{Code, Failure, clock, task};
use proto::{
    names,
    v1::{
        EvictRequest, EvictResponse, FollowRequest, FollowResponse, GrantRequest, GrantResponse,
        ListSlotsRequest, ListSlotsResponse, LookupRequest, LookupResponse, PinRequest,
        PinResponse, PrefixHandle, PullRequest, PullResponse, RedeemRequest, RedeemResponse,
        ReleaseRequest, ReleaseResponse, RenewRequest, RenewResponse, ReserveRequest,
        ReserveResponse, SealPartRequest, SealPartResponse, SealRequest, SealResponse,
        kv_transfer_service_server::{KvTransferService, KvTransferServiceServer},
    },
};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::bounded;

/// Generation of every slot.
const GENERATION: u64 = 77;
/// Time to live that a stage gives a new lease.
const FIRST_TTL: Duration = Duration::from_secs(20);

/// What happened to one lease.
#[derive(Debug, Clone)]
pub(crate) struct Book {
    pub(crate) renewals: usize,
    pub(crate) releases: usize,
    /// Receivers that tokens were made for, and what these replaced.
    pub(crate) granted: Vec<(String, Vec<u8>)>,
    expiry: Instant,
}

#[derive(Debug, Default)]
struct Books {
    leases: BTreeMap<u64, Book>,
    /// Leases are gone from the books once they were released, and so are their numbers.
    forgets: bool,
    /// Leases so far.
    count: u64,
    /// Answer of every renewal from now on.
    refuse: Option<Failure>,
    /// Of what is published from now on.
    identity: Vec<u8>,
}

/// The service and its books. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    endpoint: String,
    books: Arc<watch::Sender<Books>>,
    /// Leases before its first one.
    before: u64,
    _server: Option<Arc<Mutex<task::Owned<()>>>>,
}

impl Pool {
    pub(crate) async fn start() -> Self {
        let listener = proto::server::bind("127.0.0.1:0", "listen").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (mut routes, _health) = proto::server::routes(&[names::KV_TRANSFER]).await.unwrap();
        let books = Arc::new(watch::channel(Books::default()).0);
        routes.add_service(KvTransferServiceServer::new(Service(books.clone())));
        let server = task::spawn(async move {
            let served = proto::server::serve(listener, routes, std::future::pending()).await;
            served.unwrap();
        });
        Self {
            endpoint,
            books,
            before: 0,
            _server: Some(Arc::new(Mutex::new(server))),
        }
    }

    /// A pool that somebody else serves at `endpoint`; its leases are told from those of others by `number` and by
    /// when it began.
    pub(crate) fn simulated(
        endpoint: String,
        number: usize,
    ) -> (Self, KvTransferServiceServer<impl KvTransferService>) {
        let books = Arc::new(watch::channel(Books::default()).0);
        let service = KvTransferServiceServer::new(Service(books.clone()));
        let began = turmoil::sim_elapsed().unwrap_or_default().as_millis() as u64;
        let pool = Self {
            endpoint,
            books,
            before: (number as u64 + 1) * 1_000_000_000 + began * 1_000,
            _server: None,
        };
        (pool, service)
    }

    /// What a stage has after it published.
    pub(crate) fn publish(&self) -> PrefixHandle {
        let (mut lease, mut identity) = (0, vec![]);
        self.books.send_modify(|books| {
            identity.clone_from(&books.identity);
            books.count += 1;
            lease = self.before + books.count;
            let book = Book {
                renewals: 0,
                releases: 0,
                granted: Vec::new(),
                expiry: clock::now() + FIRST_TTL,
            };
            books.leases.insert(lease, book);
        });
        PrefixHandle {
            identity,
            endpoint: self.endpoint.clone(),
            slot: lease * 10,
            generation: GENERATION,
            tokens: 9,
            lease,
            ..PrefixHandle::default()
        }
    }

    /// Keeps no books on what was released.
    pub(crate) fn forget(&self) {
        self.books.send_modify(|books| books.forgets = true);
    }

    /// From here on every renewal fails like this.
    pub(crate) fn refuse(&self, code: Code, message: &str) {
        let failure = Failure::new(code, message);
        self.books
            .send_modify(|books| books.refuse = Some(failure.clone()));
    }

    /// Answers again.
    pub(crate) fn heal(&self) {
        self.books.send_modify(|books| books.refuse = None);
    }

    /// Names what is published from here on.
    pub(crate) fn rename(&self, identity: u8) {
        self.books
            .send_modify(|books| books.identity = vec![identity; 32]);
    }

    pub(crate) fn books(&self) -> Vec<Book> {
        self.books.borrow().leases.values().cloned().collect()
    }

    /// Waits until `count` leases were published and each of them was released.
    pub(crate) async fn released(&self, count: usize) {
        self.until(|books| books.len() == count && books.iter().all(|book| book.releases > 0))
            .await;
    }

    /// Waits until the books look so.
    pub(crate) async fn until(&self, so: impl Fn(&[&Book]) -> bool) {
        let mut changes = self.books.subscribe();
        let look = |books: &Books| so(&books.leases.values().collect::<Vec<_>>());
        bounded(changes.wait_for(look)).await.unwrap();
    }
}

#[derive(Debug)]
struct Service(Arc<watch::Sender<Books>>);

/// The lease that a call names, if it is alive.
fn find(books: &mut Books, named: (u64, u64, u64)) -> Option<&mut Book> {
    let (slot, generation, lease) = named;
    let right = generation == GENERATION && slot == lease * 10;
    let book = books.leases.get_mut(&lease).filter(|_| right)?;
    (book.expiry > clock::now()).then_some(book)
}

#[tonic::async_trait]
impl KvTransferService for Service {
    async fn renew(
        &self,
        request: Request<RenewRequest>,
    ) -> Result<Response<RenewResponse>, Status> {
        let renew = request.into_inner();
        let mut answer = Ok(Response::new(RenewResponse {}));
        self.0.send_modify(|books| {
            let refusal = books.refuse.clone();
            let book = find(books, (renew.slot, renew.generation, renew.lease));
            let gone = Failure::new(Code::NotFound, "no such lease");
            match (refusal, book) {
                (Some(refusal), book) => {
                    // An answer that is lost on its way: the lease was prolonged.
                    if let Some(book) = book {
                        book.renewals += 1;
                        book.expiry = clock::now() + Duration::from_millis(renew.ttl_ms.into());
                    }
                    answer = Err(proto::status::status(&refusal));
                }
                (None, Some(book)) if book.releases == 0 => {
                    book.renewals += 1;
                    // Only the latest renewal counts here, so that a late one is noticed.
                    book.expiry = clock::now() + Duration::from_millis(renew.ttl_ms.into());
                }
                _ => answer = Err(proto::status::status(&gone)),
            }
        });
        answer
    }

    async fn release(
        &self,
        request: Request<ReleaseRequest>,
    ) -> Result<Response<ReleaseResponse>, Status> {
        let named = request.into_inner();
        self.0.send_modify(|books| {
            if let Some(book) = find(books, (named.slot, named.generation, named.lease)) {
                book.releases += 1;
                if books.forgets {
                    books.leases.remove(&named.lease);
                }
            }
        });
        Ok(Response::new(ReleaseResponse {}))
    }

    async fn grant(
        &self,
        request: Request<GrantRequest>,
    ) -> Result<Response<GrantResponse>, Status> {
        let asked = request.into_inner();
        let mut answer = Err(Status::not_found("no such lease"));
        self.0.send_modify(|books| {
            let refusal = books.refuse.clone();
            let book = find(books, (asked.slot, asked.generation, asked.lease));
            match (refusal, book) {
                (Some(refusal), _) => answer = Err(proto::status::status(&refusal)),
                (None, Some(book)) => {
                    book.granted
                        .push((asked.receiver.clone(), asked.replaces.clone()));
                    let token = vec![book.granted.len() as u8; 16];
                    answer = Ok(Response::new(GrantResponse { token }));
                }
                (None, None) => {}
            }
        });
        answer
    }

    async fn redeem(&self, _: Request<RedeemRequest>) -> Result<Response<RedeemResponse>, Status> {
        Err(Status::unimplemented("redeem"))
    }

    async fn reserve(
        &self,
        _: Request<ReserveRequest>,
    ) -> Result<Response<ReserveResponse>, Status> {
        Err(Status::unimplemented("reserve"))
    }

    async fn seal(&self, _: Request<SealRequest>) -> Result<Response<SealResponse>, Status> {
        Err(Status::unimplemented("seal"))
    }

    async fn pull(&self, _: Request<PullRequest>) -> Result<Response<PullResponse>, Status> {
        Err(Status::unimplemented("pull"))
    }

    async fn list(
        &self,
        _: Request<ListSlotsRequest>,
    ) -> Result<Response<ListSlotsResponse>, Status> {
        Err(Status::unimplemented("list"))
    }

    async fn seal_part(
        &self,
        _: Request<SealPartRequest>,
    ) -> Result<Response<SealPartResponse>, Status> {
        Err(Status::unimplemented("seal_part"))
    }

    type FollowStream = tokio_stream::Empty<Result<FollowResponse, Status>>;

    async fn follow(
        &self,
        _: Request<FollowRequest>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        Err(Status::unimplemented("follow"))
    }

    async fn lookup(&self, _: Request<LookupRequest>) -> Result<Response<LookupResponse>, Status> {
        Err(Status::unimplemented("lookup"))
    }

    async fn pin(&self, _: Request<PinRequest>) -> Result<Response<PinResponse>, Status> {
        Err(Status::unimplemented("pin"))
    }

    async fn evict(&self, _: Request<EvictRequest>) -> Result<Response<EvictResponse>, Status> {
        Err(Status::unimplemented("evict"))
    }
}
