"""Stand-ins that let the unmodified SGLang wheel run where there is no accelerator; inert where there is one."""
