//! What is asked of the router.
use base::limits::CONTROL_DEADLINE;
use proto::v1::{
    ClusterEvent, ListMembersRequest, ListMembersResponse, ListRequestsRequest, RequestRecord,
    WatchEventsRequest, admin_service_client::AdminServiceClient,
};
use tonic::transport::Channel;

use crate::error::CliError;

pub(crate) type Admin = AdminServiceClient<Channel>;

/// A connection to the router's administration.
pub(crate) async fn admin(endpoint: &str) -> Result<Admin, CliError> {
    Ok(Admin::new(proto::channel::connect(endpoint).await?)
        .max_decoding_message_size(base::limits::MAX_RESPONSE_BYTES))
}

/// A control call, with its deadline.
pub(crate) fn control<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CONTROL_DEADLINE);
    request
}

/// Who is alive.
pub(crate) async fn members(endpoint: &str) -> Result<ListMembersResponse, CliError> {
    let ask = control(ListMembersRequest {});
    Ok(admin(endpoint).await?.list_members(ask).await?.into_inner())
}

/// What has happened after this number.
pub(crate) async fn events(endpoint: &str, after: u64) -> Result<Vec<ClusterEvent>, CliError> {
    let ask = control(WatchEventsRequest {
        after,
        follow: false,
    });
    let mut stream = admin(endpoint).await?.watch_events(ask).await?.into_inner();
    let mut all = vec![];
    while let Some(told) = stream.message().await? {
        all.extend(told.event);
    }
    Ok(all)
}

/// Records of requests.
pub(crate) async fn records(
    endpoint: &str,
    ids: &[String],
    full: bool,
) -> Result<Vec<RequestRecord>, CliError> {
    let ask = control(ListRequestsRequest {
        request_ids: ids.to_vec(),
        limit: 0,
        full,
    });
    let answer = admin(endpoint).await?.list_requests(ask).await?;
    Ok(answer.into_inner().requests)
}
