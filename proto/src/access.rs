//! Who may call what. A process says who it is by a URI in its certificate, `omni://ROLE/NAME`; which
//! roles may use a service stands in one table. Servers in clear know nobody and ask nobody.
use std::{
    fmt,
    str::FromStr,
    sync::Arc,
    task::{Context, Poll},
};

use base::{Code, Failure};
use tokio_rustls::rustls::pki_types::CertificateDer;
use tonic::{body::Body, codegen::http};

use crate::names;

/// Scheme of the names in certificates.
const SCHEME: &str = "omni://";
/// Most roles of one certificate that are looked at.
const MAX_ROLES: usize = 8;

/// What a certificate says that its holder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Places and dispatches requests.
    Router,
    /// Makes prefixes.
    ArStage,
    /// Holds and moves prefixes.
    KvTransfer,
    /// Makes images.
    DitWorker,
    /// An operator with `omnictl`.
    Admin,
    /// Whoever asks for images.
    Client,
    /// Whoever looks at metrics and at the status page, and changes nothing.
    Monitor,
}

impl Role {
    /// Every role.
    pub const ALL: [Self; 7] = [
        Self::Router,
        Self::ArStage,
        Self::KvTransfer,
        Self::DitWorker,
        Self::Admin,
        Self::Client,
        Self::Monitor,
    ];

    /// As certificates have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::ArStage => "ar-stage",
            Self::KvTransfer => "kv-transfer",
            Self::DitWorker => "dit-worker",
            Self::Admin => "admin",
            Self::Client => "client",
            Self::Monitor => "monitor",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Role {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let found = Self::ALL.into_iter().find(|role| role.name() == text);
        found.ok_or_else(|| {
            let legal = Self::ALL.map(Self::name).join(", ");
            Failure::invalid("role", format!("role must be one of {legal}, got {text:?}"))
        })
    }
}

/// Who is at the other end of a connection. In the extensions of a request where the connection is
/// TLS; absent where it is in clear.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peer(Arc<Vec<(Role, String)>>);

impl Peer {
    /// From a certificate whose chain has been checked; nobody without one.
    pub fn of(certificate: Option<&CertificateDer<'_>>) -> Self {
        let parsed = certificate.map(webpki::EndEntityCert::try_from);
        let Some(Ok(parsed)) = parsed else {
            return Self::default();
        };
        let known = parsed.valid_uri_names().filter_map(parse).take(MAX_ROLES);
        Self(Arc::new(known.collect()))
    }

    /// The certificate names this role.
    pub fn is(&self, role: Role) -> bool {
        self.0.iter().any(|(own, _)| *own == role)
    }

    /// The name beside a role, if the certificate has that role.
    pub fn name(&self, role: Role) -> Option<&str> {
        let found = self.0.iter().find(|(own, _)| *own == role);
        found.map(|(_, name)| name.as_str())
    }

    /// The certificate names no role, or there is none.
    pub fn is_nobody(&self) -> bool {
        self.0.is_empty()
    }

    /// Every role that the certificate names, for messages.
    pub fn roles(&self) -> String {
        let names: Vec<_> = self.0.iter().map(|(role, _)| role.name()).collect();
        names.join(", ")
    }
}

/// `omni://ROLE/NAME`, the name 1 to 64 characters of `[A-Za-z0-9._-]`.
fn parse(uri: &str) -> Option<(Role, String)> {
    let (role, name) = uri.strip_prefix(SCHEME)?.split_once('/')?;
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let fits = (1..=base::limits::MAX_ID_CHARS).contains(&name.len());
    (fits && name.bytes().all(legal)).then_some((role.parse().ok()?, name.to_owned()))
}

/// The URI of a certificate's holder.
pub fn uri(role: Role, name: &str) -> String {
    format!("{SCHEME}{role}/{name}")
}

/// Who may use what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Whoever could connect.
    Anyone,
    /// Who has one of these roles.
    Roles(&'static [Role]),
}

use Role::{Admin, ArStage, DitWorker, KvTransfer, Router};

/// Methods that differ from the rest of their service.
const METHODS: [(&str, &str, &[Role]); 11] = [
    (names::REGISTRY, "CordonMember", &[Router, Admin]),
    (names::REGISTRY, "DrainMember", &[Router, Admin]),
    (
        names::REGISTRY,
        "PublishPlan",
        &[Router, ArStage, DitWorker, Admin],
    ),
    (names::KV_TRANSFER, "Reserve", &[ArStage, KvTransfer, Admin]),
    (
        names::KV_TRANSFER,
        "SealPart",
        &[ArStage, KvTransfer, Admin],
    ),
    (names::KV_TRANSFER, "Seal", &[ArStage, KvTransfer, Admin]),
    // Who answers for a prefix says who may pull it.
    (names::KV_TRANSFER, "Grant", &[Router, Admin]),
    (names::KV_TRANSFER, "List", &[Router, Admin]),
    (names::KV_TRANSFER, "Pin", &[Admin]),
    (names::KV_TRANSFER, "Evict", &[Admin]),
    (
        names::KV_TRANSFER,
        "Renew",
        &[Router, ArStage, KvTransfer, DitWorker, Admin],
    ),
];

/// Everything else, by service. A service that is not here is closed.
const SERVICES: [(&str, Rule); 9] = [
    // The front asks further: for a key, or for a certificate.
    (names::IMAGE, Rule::Anyone),
    (names::ADMIN, Rule::Roles(&[Admin])),
    (
        names::REGISTRY,
        Rule::Roles(&[Router, ArStage, KvTransfer, DitWorker]),
    ),
    (names::AR_STAGE, Rule::Roles(&[Router])),
    (names::DIT_WORKER, Rule::Roles(&[Router])),
    (
        names::KV_TRANSFER,
        Rule::Roles(&[Router, ArStage, KvTransfer, DitWorker, Admin]),
    ),
    ("grpc.health.v1.Health", Rule::Anyone),
    ("grpc.reflection.v1.ServerReflection", Rule::Anyone),
    ("grpc.reflection.v1alpha.ServerReflection", Rule::Anyone),
];

fn rule(service: &str, method: &str) -> Rule {
    let special = METHODS
        .iter()
        .find(|row| (row.0, row.1) == (service, method));
    if let Some((_, _, roles)) = special {
        return Rule::Roles(roles);
    }
    let service = SERVICES.iter().find(|(name, _)| *name == service);
    service.map_or(Rule::Roles(&[]), |(_, rule)| *rule)
}

/// May this peer call `/SERVICE/METHOD`?
///
/// # Errors
/// `UNAUTHENTICATED` for a peer without a role, `PERMISSION_DENIED` for one of another role.
pub fn check(peer: &Peer, path: &str) -> Result<(), Failure> {
    let (service, method) = path
        .trim_start_matches('/')
        .split_once('/')
        .unwrap_or_default();
    let Rule::Roles(allowed) = rule(service, method) else {
        return Ok(());
    };
    if allowed.iter().any(|role| peer.is(*role)) {
        return Ok(());
    }
    if peer.is_nobody() {
        let message = format!("{service}/{method} needs a certificate that names a role");
        return Err(Failure::new(Code::Unauthenticated, message));
    }
    let roles = peer.roles();
    let message = format!("{roles} may not call {service}/{method}");
    Err(Failure::new(Code::PermissionDenied, message))
}

/// Checks every request of a server before it is decoded.
#[derive(Debug, Clone)]
pub(crate) struct Guard<S>(pub(crate) S);

impl<S> tower::Service<http::Request<Body>> for Guard<S>
where
    S: tower::Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future =
        futures_util::future::Either<std::future::Ready<Result<S::Response, S::Error>>, S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let peer = request.extensions().get::<Peer>();
        let checked = peer.map_or(Ok(()), |peer| check(peer, request.uri().path()));
        match checked {
            Ok(()) => futures_util::future::Either::Right(self.0.call(request)),
            Err(failure) => {
                tracing::warn!(reason = %failure.message, "call refused");
                let response = crate::status::status(&failure).into_http();
                futures_util::future::Either::Left(std::future::ready(Ok(response)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    fn peer(roles: &[Role]) -> Peer {
        let named = roles.iter().map(|role| (*role, "x".to_owned()));
        Peer(Arc::new(named.collect()))
    }

    #[test]
    fn every_service_of_the_contract_has_a_rule_and_every_exception_a_method() {
        let set = prost_types::FileDescriptorSet::decode(crate::DESCRIPTOR_SET).unwrap();
        let mut methods = Vec::new();
        for file in &set.file {
            for service in &file.service {
                let name = format!("{}.{}", file.package(), service.name());
                assert!(SERVICES.iter().any(|(known, _)| *known == name), "{name}");
                let own = service.method.iter();
                methods.extend(own.map(|method| (name.clone(), method.name().to_owned())));
            }
        }
        for (service, method, _) in METHODS {
            let known = (service.to_owned(), method.to_owned());
            assert!(methods.contains(&known), "{service}/{method}");
        }
    }

    #[test]
    fn roles_may_do_their_own_work_and_nothing_else() {
        for (role, path, may) in [
            (Role::Router, "omni.v1.DitWorkerService/Denoise", true),
            (Role::DitWorker, "omni.v1.DitWorkerService/Denoise", false),
            (Role::DitWorker, "omni.v1.AdminService/Drain", false),
            (Role::Router, "omni.v1.AdminService/Drain", false),
            (Role::Admin, "omni.v1.AdminService/Drain", true),
            (Role::Client, "omni.v1.AdminService/ListMembers", false),
            (Role::Client, "omni.v1.ImageService/Generate", true),
            (Role::DitWorker, "omni.v1.KvTransferService/Pull", true),
            (Role::DitWorker, "omni.v1.KvTransferService/Reserve", false),
            (Role::Client, "omni.v1.KvTransferService/Pull", false),
            (Role::Monitor, "omni.v1.AdminService/ListMembers", false),
            (Role::ArStage, "omni.v1.KvTransferService/Evict", false),
            (Role::KvTransfer, "omni.v1.RegistryService/Register", true),
            (
                Role::KvTransfer,
                "omni.v1.RegistryService/DrainMember",
                false,
            ),
            (Role::Admin, "omni.v1.NewService/Anything", false),
        ] {
            let checked = check(&peer(&[role]), &format!("/{path}"));
            assert_eq!(checked.is_ok(), may, "{role} {path}: {checked:?}");
            if let Err(failure) = checked {
                assert_eq!(failure.code, Code::PermissionDenied);
                assert!(failure.message.contains(role.name()), "{failure:?}");
            }
        }
        let nobody = check(&Peer::default(), "/omni.v1.AdminService/Drain").unwrap_err();
        assert_eq!(nobody.code, Code::Unauthenticated);
        let both = peer(&[Role::Router, Role::DitWorker]);
        assert!(check(&both, "/omni.v1.ArStageService/Prefill").is_ok());
    }

    #[test]
    fn names_in_certificates_are_read_strictly() {
        assert_eq!(
            parse("omni://router/a.b-c_1"),
            Some((Role::Router, "a.b-c_1".to_owned()))
        );
        for bad in [
            "omni://router",
            "omni://router/",
            "omni://nobody/x",
            "spiffe://router/x",
            "omni://router/a/b",
            "omni://router/ä",
            "OMNI://router/x",
            "omni://Router/x",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(
            parse(&uri(Role::Client, "acme")),
            Some((Role::Client, "acme".to_owned()))
        );
    }
}
