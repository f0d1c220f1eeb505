//! Deadlines on the wire: the `grpc-timeout` header. tonic enforces it only up to the first byte
//! of an answer, so streaming handlers read it themselves.
use std::time::Duration;

use tonic::metadata::MetadataMap;

const HEADER: &str = "grpc-timeout";
/// gRPC allows eight digits.
const MAX_DIGITS: usize = 8;

/// The timeout the caller asked for; `None` when absent or malformed.
pub fn timeout(metadata: &MetadataMap) -> Option<Duration> {
    parse(metadata.get(HEADER)?.to_str().ok()?)
}

fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > MAX_DIGITS {
        return None;
    }
    let count: u64 = digits
        .bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| digits.parse().ok())??;
    match unit {
        "H" => Some(Duration::from_secs(count * 3_600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_read_and_nonsense_is_absent() {
        assert_eq!(parse("2H"), Some(Duration::from_secs(7_200)));
        assert_eq!(parse("3M"), Some(Duration::from_secs(180)));
        assert_eq!(parse("99999999S"), Some(Duration::from_secs(99_999_999)));
        assert_eq!(parse("5m"), Some(Duration::from_millis(5)));
        assert_eq!(parse("7u"), Some(Duration::from_micros(7)));
        assert_eq!(parse("9n"), Some(Duration::from_nanos(9)));
        for bad in ["", "S", "1", "-1S", "+1S", "1x", "123456789S", "１S", "1ä"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn what_tonic_writes_is_read_back() {
        let mut request = tonic::Request::new(());
        request.set_timeout(Duration::from_millis(1_500));
        assert_eq!(
            timeout(request.metadata()),
            Some(Duration::from_millis(1_500))
        );
    }
}
