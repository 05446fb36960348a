//! How requests reach the provider. [`post_list`] chains `ibv_send_wr` and hands them over by one call.

pub(crate) mod post_list;
