//! The list of hosts that pictures may be fetched from, and addresses taken apart by it.
use std::{fmt, str::FromStr};

use hyper::Uri;

/// Why a list of hosts is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("must be hosts separated by commas, each NAME or *.NAME with or without :PORT, got {0:?}")]
pub struct HostListError(String);

/// One entry.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    /// In lower case.
    name: String,
    /// The names below it, too, and not itself.
    below: bool,
    /// Only this port; else the usual one of the scheme.
    port: Option<u16>,
}

/// Hosts that pictures may be fetched from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostList(Vec<Rule>);

impl FromStr for HostList {
    type Err = HostListError;

    fn from_str(text: &str) -> Result<Self, HostListError> {
        let entries = text
            .split(',')
            .map(str::trim)
            .filter(|entry| !entry.is_empty());
        let rules = entries.map(|entry| rule(entry).ok_or_else(|| HostListError(entry.into())));
        Ok(Self(rules.collect::<Result<_, _>>()?))
    }
}

fn rule(entry: &str) -> Option<Rule> {
    let (host, port) = match entry.rsplit_once(':') {
        Some((host, port)) => (host, Some(port.parse().ok().filter(|port| *port > 0)?)),
        None => (entry, None),
    };
    let (name, below) = match host.strip_prefix("*.") {
        Some(name) => (name, true),
        None => (host, false),
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
    let legal = !name.is_empty() && name.len() <= 253 && name.bytes().all(plain);
    legal.then(|| Rule {
        name: name.to_ascii_lowercase(),
        below,
        port,
    })
}

/// Where a picture is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) secure: bool,
    pub(super) host: String,
    pub(super) port: u16,
    /// With its query.
    pub(super) path: String,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https" } else { "http" };
        write!(f, "{scheme}://{}{}", self.authority(), self.path)
    }
}

impl Target {
    fn usual_port(&self) -> u16 {
        if self.secure { 443 } else { 80 }
    }

    /// Host and, unless it is the usual one, port.
    pub(super) fn authority(&self) -> String {
        if self.port == self.usual_port() {
            self.host.clone()
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// The address that a redirect from here names.
    pub(super) fn resolve(&self, location: &str) -> String {
        if location.starts_with('/') && !location.starts_with("//") {
            let path = location.to_owned();
            return Self {
                path,
                ..self.clone()
            }
            .to_string();
        }
        location.to_owned()
    }
}

impl HostList {
    /// Nothing is allowed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes an address apart.
    ///
    /// # Errors
    /// Why it is not fetched, in words that follow the picture's name.
    pub(super) fn target(&self, url: &str) -> Result<Target, String> {
        let uri: Uri = url.parse().map_err(|_| "must be an http or https URL")?;
        let secure = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err("must be an http or https URL".to_owned()),
        };
        let authority = uri.authority().ok_or("must be a URL with a host")?;
        if authority.as_str().contains('@') {
            return Err("must be a URL without user and password".to_owned());
        }
        let host = authority.host().trim_end_matches('.').to_ascii_lowercase();
        let usual = if secure { 443 } else { 80 };
        let target = Target {
            secure,
            port: authority.port_u16().unwrap_or(usual),
            path: uri
                .path_and_query()
                .map_or("/", |path| path.as_str())
                .to_owned(),
            host,
        };
        if self.0.iter().any(|rule| rule.admits(&target)) {
            Ok(target)
        } else {
            Err(format!(
                "must be at a host that is allowed, {} is not",
                target.authority()
            ))
        }
    }
}

impl Rule {
    fn admits(&self, target: &Target) -> bool {
        let host = target.host.as_str();
        let named = if self.below {
            let above = host.strip_suffix(&self.name);
            above.is_some_and(|above| above.len() > 1 && above.ends_with('.'))
        } else {
            host == self.name
        };
        named && target.port == self.port.unwrap_or(target.usual_port())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_hosts_at_their_usual_ports_pass() {
        let list: HostList = "images.example, *.cdn.example:8443".parse().unwrap();
        for good in [
            "https://images.example/a.png",
            "http://IMAGES.example./a.png?b=c",
            "https://a.b.cdn.example:8443/",
        ] {
            assert!(list.target(good).is_ok(), "{good}");
        }
        for bad in [
            "https://images.example:8443/a.png",
            "https://other.example/a.png",
            "https://images.example.other/a.png",
            "https://notimages.example/a.png",
            "https://cdn.example:8443/",
            "https://xcdn.example:8443/",
            "https://a.cdn.example/",
            "https://images.example@evil.example/",
            "https://user:word@images.example/",
            "ftp://images.example/a.png",
            "file:///etc/passwd",
            "images.example/a.png",
            "//images.example/a.png",
            "",
        ] {
            assert!(list.target(bad).is_err(), "{bad}");
        }
        let target = list.target("https://images.example/a.png?b#c").unwrap();
        assert_eq!((target.port, target.path.as_str()), (443, "/a.png?b"));
        assert_eq!(target.resolve("/c.png"), "https://images.example/c.png");
        assert_eq!(target.resolve("//evil.example/"), "//evil.example/");
    }

    #[test]
    fn a_list_is_names_and_ports() {
        assert!(HostList::from_str("").unwrap().is_empty());
        for bad in ["*", "*.", "a b", "a:0", "a:x", "http://a", "a/b", "[::1]"] {
            assert!(HostList::from_str(bad).is_err(), "{bad}");
        }
    }
}
