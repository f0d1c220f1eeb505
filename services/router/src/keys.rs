//! API keys: who asks, what that one may take, and how urgent its requests may be. A file names keys by
//! their digests alone; it is read again while the router runs.
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use base::{Code, Fault};
use proto::v1::Priority;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::admission::{MAX_TENANT_BYTES, Quota};

/// How often the file of a running router is looked at.
const POLL: Duration = Duration::from_secs(2);
/// Largest file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Most keys of one file.
const MAX_KEYS: usize = 16_384;
/// Longest key that is looked up, in bytes.
const MAX_KEY_BYTES: usize = 512;
/// What keys begin with, so that a leaked one is recognised.
const MARK: &str = "omni-";
const DIGEST_BYTES: usize = 32;

/// Why the keys cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("api_keys {path}: {reason}")]
pub struct KeysError {
    path: String,
    reason: String,
}

impl Fault for KeysError {
    fn code(&self) -> Code {
        Code::InvalidArgument
    }
    fn field(&self) -> Option<&str> {
        Some("api_keys")
    }
}

/// What a key stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) tenant: String,
    pub(crate) quota: Quota,
    /// The most urgent class it may ask for.
    pub(crate) ceiling: Priority,
}

/// One `[[key]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Digest of the key, in hex.
    sha256: String,
    tenant: String,
    priority: Option<String>,
    max_running: Option<usize>,
    max_queued: Option<usize>,
    weight: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    key: Vec<Entry>,
}

#[derive(Debug)]
struct Table {
    text: String,
    grants: HashMap<[u8; DIGEST_BYTES], Arc<Grant>>,
}

/// The keys in force.
#[derive(Debug)]
pub struct ApiKeys {
    path: PathBuf,
    table: RwLock<Arc<Table>>,
}

impl ApiKeys {
    /// Reads a file.
    ///
    /// # Errors
    /// A file that cannot be read, or the entry at fault.
    pub fn load(path: &Path) -> Result<Arc<Self>, KeysError> {
        let table = parse(path, read(path)?)?;
        Ok(Arc::new(Self {
            path: path.to_owned(),
            table: RwLock::new(Arc::new(table)),
        }))
    }

    /// Reads the file again; true when it had changed and is in force from now on.
    ///
    /// # Errors
    /// As [`ApiKeys::load`]; what was in force stays in force.
    pub fn reload(&self) -> Result<bool, KeysError> {
        let text = read(&self.path)?;
        if self.now().text == text {
            return Ok(false);
        }
        let table = Arc::new(parse(&self.path, text)?);
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = table;
        Ok(true)
    }

    /// Follows the file for as long as it is polled.
    pub(crate) async fn follow(self: Arc<Self>) {
        let told = |outcome: Result<(), &KeysError>| match outcome {
            Ok(()) => {
                tracing::info!(keys = self.now().grants.len(), "API keys were read again");
            }
            Err(error) => tracing::warn!(%error, "the API keys in force stay in force"),
        };
        base::follow(POLL, || self.reload(), told).await;
    }

    /// What a key stands for, if it is known.
    pub(crate) fn grant(&self, key: &str) -> Option<Arc<Grant>> {
        if key.len() > MAX_KEY_BYTES {
            return None;
        }
        let digest: [u8; DIGEST_BYTES] = Sha256::digest(key.as_bytes()).into();
        self.now().grants.get(&digest).cloned()
    }

    fn now(&self) -> Arc<Table> {
        self.table
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// A new key of a tenant: the key, to be given away, and its entry, to be added to the file.
///
/// # Errors
/// A tenant whose name cannot be one.
pub fn new_key(tenant: &str, random: &[u64; 4]) -> Result<(String, String), String> {
    check_tenant(tenant)?;
    let hex: Vec<_> = random.iter().map(|word| format!("{word:016x}")).collect();
    let key = format!("{MARK}{}", hex.concat());
    let digest: Vec<_> = Sha256::digest(key.as_bytes())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let entry = format!(
        "[[key]]\nsha256 = \"{}\"\ntenant = \"{tenant}\"\n",
        digest.concat()
    );
    Ok((key, entry))
}

fn read(path: &Path) -> Result<String, KeysError> {
    let bad = |reason: String| KeysError {
        path: path.display().to_string(),
        reason,
    };
    let size = std::fs::metadata(path).map_err(|error| bad(error.to_string()))?;
    if size.len() > MAX_FILE_BYTES {
        return Err(bad(format!("is larger than {MAX_FILE_BYTES} bytes")));
    }
    std::fs::read_to_string(path).map_err(|error| bad(error.to_string()))
}

fn parse(path: &Path, text: String) -> Result<Table, KeysError> {
    let bad = |reason: String| KeysError {
        path: path.display().to_string(),
        reason,
    };
    // The parser's own text quotes the line at fault, and a line may hold a key by mistake.
    let file: File = toml::from_str(&text).map_err(|error| {
        let end = error.span().map_or(0, |span| span.start.min(text.len()));
        let line = text.get(..end).unwrap_or_default().matches('\n').count() + 1;
        bad(format!("line {line}: {}", error.message()))
    })?;
    if file.key.len() > MAX_KEYS {
        return Err(bad(format!("holds more than {MAX_KEYS} keys")));
    }
    let mut grants = HashMap::new();
    for (index, entry) in file.key.into_iter().enumerate() {
        let at = |reason: String| bad(format!("key {}: {reason}", index + 1));
        let digest = digest(&entry.sha256)
            .ok_or_else(|| at("sha256 must be the digest of a key, 64 hex digits".to_owned()))?;
        let grant = grant(entry).map_err(at)?;
        if grants.insert(digest, Arc::new(grant)).is_some() {
            return Err(at("the same sha256 stands twice".to_owned()));
        }
    }
    Ok(Table { text, grants })
}

fn digest(hex: &str) -> Option<[u8; DIGEST_BYTES]> {
    let mut digest = [0; DIGEST_BYTES];
    if hex.len() != 2 * DIGEST_BYTES || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    for (index, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(digest)
}

/// A tenant's name also stands in certificates, metrics of admission and cache scopes.
fn check_tenant(tenant: &str) -> Result<(), String> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let longest = base::limits::MAX_ID_CHARS.min(MAX_TENANT_BYTES);
    if (1..=longest).contains(&tenant.len()) && tenant.bytes().all(legal) {
        return Ok(());
    }
    Err(format!(
        "tenant must be 1 to {longest} characters of [A-Za-z0-9._-]"
    ))
}

fn grant(entry: Entry) -> Result<Grant, String> {
    check_tenant(&entry.tenant)?;
    let ceiling = match entry.priority.as_deref() {
        None | Some("interactive") => Priority::Interactive,
        Some("standard") => Priority::Standard,
        Some("background") => Priority::Background,
        Some(_) => return Err("priority must be interactive, standard or background".to_owned()),
    };
    let bounded = |name: &str, value: Option<usize>, default| match value {
        Some(0) => Err(format!("{name} must be at least 1")),
        value => Ok(value.unwrap_or(default)),
    };
    let open = Quota::default();
    let weight = entry.weight.unwrap_or(open.weight);
    if weight == 0 {
        return Err("weight must be at least 1".to_owned());
    }
    Ok(Grant {
        tenant: entry.tenant,
        quota: Quota {
            max_running: bounded("max_running", entry.max_running, open.max_running)?,
            max_queued: bounded("max_queued", entry.max_queued, open.max_queued)?,
            weight,
        },
        ceiling,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Arc<ApiKeys>, KeysError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.toml");
        std::fs::write(&path, text).unwrap();
        ApiKeys::load(&path)
    }

    #[test]
    fn a_new_key_opens_what_its_entry_says_and_the_file_does_not_hold_it() {
        let (key, entry) = new_key("acme", &[1, 2, 3, 4]).unwrap();
        let text = format!("{entry}priority = \"standard\"\nmax_running = 2\nweight = 3\n");
        assert!(!text.contains(&key));
        let keys = load(&text).unwrap();
        let grant = keys.grant(&key).unwrap();
        assert_eq!(
            (grant.tenant.as_str(), grant.ceiling),
            ("acme", Priority::Standard)
        );
        let quota = Quota {
            max_running: 2,
            weight: 3,
            ..Quota::default()
        };
        assert_eq!(grant.quota, quota);
        for other in [
            "",
            "omni-",
            &key[1..],
            &format!("{key} "),
            &"x".repeat(1 << 20),
        ] {
            assert_eq!(keys.grant(other), None);
        }
        assert!(new_key("a b", &[0; 4]).is_err());
    }

    #[test]
    fn bad_files_are_refused_by_what_is_wrong_without_showing_a_line() {
        let (secret, entry) = new_key("acme", &[9; 4]).unwrap();
        for (text, said) in [
            (
                format!("[[key]]\nkey = \"{secret}\"\n"),
                "line 2: unknown field",
            ),
            (
                format!("[[key]]\nsha256 = \"{secret}\"\ntenant = \"a\"\n"),
                "key 1: sha256 must be",
            ),
            (entry.replace("acme", "a/b"), "key 1: tenant must be"),
            (format!("{entry}{entry}"), "key 2: the same sha256"),
            (
                format!("{entry}priority = \"urgent\"\n"),
                "key 1: priority must be",
            ),
            (
                format!("{entry}max_queued = 0\n"),
                "key 1: max_queued must be at least 1",
            ),
            (
                format!("{entry}weight = 0\n"),
                "key 1: weight must be at least 1",
            ),
            ("[[keys]]\n".to_owned(), "line 1: unknown field"),
        ] {
            let error = load(&text).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(said) && !text.contains(&secret), "{text}");
            assert_eq!(error.field(), Some("api_keys"));
        }
    }

    #[test]
    fn a_changed_file_is_in_force_and_a_broken_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.toml");
        let ((old, first), (new, second)) = (
            new_key("a", &[1; 4]).unwrap(),
            new_key("b", &[2; 4]).unwrap(),
        );
        std::fs::write(&path, first).unwrap();
        let keys = ApiKeys::load(&path).unwrap();
        assert!(!keys.reload().unwrap());
        std::fs::write(&path, second).unwrap();
        assert!(keys.reload().unwrap());
        assert!(keys.grant(&old).is_none() && keys.grant(&new).is_some());
        std::fs::write(&path, "nonsense").unwrap();
        assert!(keys.reload().is_err() && keys.grant(&new).is_some());
    }
}
