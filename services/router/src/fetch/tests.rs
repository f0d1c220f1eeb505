//! A server that tests run, which only tests may reach.
use axum::{
    Router,
    body::Body,
    http::{StatusCode, header::LOCATION},
    response::{IntoResponse as _, Response},
    routing::get,
};
use base::{Fault as _, task};
use tokio::net::TcpListener;

use super::*;

/// A PNG of 2x2 pixels.
const PICTURE: &[u8] = &[
    0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0, 0, 0, 0x0d, 0x49, 0x48, 0x44, 0x52, 0, 0, 0,
    2, 0, 0, 0, 2, 8, 2, 0, 0, 0, 0xfd, 0xd4, 0x9a, 0x73, 0, 0, 0, 0x10, 0x49, 0x44, 0x41, 0x54,
    0x78, 0x9c, 0x63, 0xf8, 0xcf, 0xc0, 0, 0x44, 0x0c, 0x10, 0x0a, 0, 0x1f, 0xee, 3, 0xfd, 0x8b,
    0xd6, 0x15, 0x4d, 0, 0, 0, 0, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60, 0x82,
];

fn to(location: &'static str) -> Response {
    (StatusCode::FOUND, [(LOCATION, location)]).into_response()
}

/// A server, its address, and its task.
async fn site() -> (SocketAddr, task::Owned<()>) {
    let endless = || async {
        let chunk = || Ok::<_, std::io::Error>(vec![0_u8; 1 << 16]);
        Body::from_stream(futures_util::stream::repeat_with(chunk))
    };
    let never = || async {
        std::future::pending::<()>().await;
    };
    let routes = Router::new()
        .route("/a.png", get(|| async { PICTURE }))
        .route("/moved", get(|| async { to("/a.png") }))
        .route("/round", get(|| async { to("/round") }))
        .route(
            "/inside",
            get(|| async { to("http://169.254.169.254/latest") }),
        )
        .route(
            "/outside",
            get(|| async { to("http://other.example/a.png") }),
        )
        .route("/nowhere", get(|| async { StatusCode::FOUND }))
        .route("/text", get(|| async { "no picture" }))
        .route("/endless", get(endless))
        .route("/never", get(never));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let served = task::spawn(async move {
        axum::serve(listener, routes).await.unwrap();
    });
    (address, served)
}

fn fetcher(hosts: &str, may_reach: fn(IpAddr) -> bool) -> Fetcher {
    let config = FetchConfig {
        hosts: hosts.parse().unwrap(),
        bytes: 1 << 18,
        time: Duration::from_secs(2),
        ..FetchConfig::default()
    };
    Fetcher {
        may_reach,
        ..Fetcher::new(config).unwrap()
    }
}

async fn reason(fetcher: &Fetcher, url: String) -> String {
    let error = fetcher.files(&[Source::Url(url)]).await.unwrap_err();
    assert_eq!(
        (error.code(), error.field()),
        (base::Code::InvalidArgument, Some("images"))
    );
    error.to_string()
}

#[tokio::test]
async fn a_picture_is_fetched_from_an_allowed_place_through_redirects() {
    let (address, _served) = site().await;
    let port = address.port();
    let fetcher = fetcher(&format!("localhost:{port}"), |_| true);
    for path in ["a.png", "moved"] {
        let url = Source::Url(format!("http://localhost:{port}/{path}"));
        let data = Source::Data(PICTURE.to_vec());
        let files = fetcher.files(&[data, url]).await.unwrap();
        assert_eq!(files, [PICTURE, PICTURE]);
    }
    for (path, why) in [
        ("round", "redirected more than 3 times"),
        (
            "outside",
            "is redirected: must be at a host that is allowed",
        ),
        ("inside", "is redirected: must be at a host that is allowed"),
        ("nowhere", "redirected to nowhere"),
        ("text", "must be a PNG"),
        ("endless", "is larger than"),
        ("never", "did not come within 2s"),
        ("missing", "status 404"),
    ] {
        let said = reason(&fetcher, format!("http://localhost:{port}/{path}")).await;
        assert!(said.contains(why), "{path}: {said}");
    }
}

#[tokio::test]
async fn an_address_that_is_not_public_is_refused_after_it_was_looked_up() {
    let (address, _served) = site().await;
    let port = address.port();
    let fetcher = fetcher(&format!("localhost:{port}, 127.0.0.1:{port}"), is_public);
    for host in ["localhost", "127.0.0.1"] {
        let said = reason(&fetcher, format!("http://{host}:{port}/a.png")).await;
        assert!(said.contains("not public"), "{said}");
    }
    // A redirect is looked up and checked like the first address.
    let only_first = |address: IpAddr| address.is_loopback();
    let redirecting = Fetcher {
        may_reach: only_first,
        ..super::tests::fetcher(&format!("localhost:{port}, 169.254.169.254"), is_public)
    };
    let said = reason(&redirecting, format!("http://localhost:{port}/inside")).await;
    assert!(said.contains("not public"), "{said}");
}

#[tokio::test]
async fn without_a_list_nothing_is_fetched() {
    let fetcher = Fetcher::new(FetchConfig::default()).unwrap();
    let url = Source::Url("https://images.example/a.png".to_owned());
    let error = fetcher.allows(std::slice::from_ref(&url)).unwrap_err();
    assert!(error.to_string().contains("fetches nothing"), "{error}");
    assert!(fetcher.files(&[url]).await.is_err());
}
