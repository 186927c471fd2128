"""What runs inside vLLM's process. The patches of vLLM 0.30 to 0.32, and what happens without each:

patches.py   packing_experts_again            CPU   kernels keep experts packed at the start: a push does not reach them
             packing_embeddings_again         CPU   a tied lm_head keeps its own packed copy of the embedding
             rotate_views_outside_the_kernel  CPU   latent attention's rotary views of 3 dimensions are read as 2
             route_by_sigmoid_without_groups  CPU   routers score by sigmoid only for experts in groups
             turn_generators_back             CPU   a seeded prompt that is computed in pieces ends the engine
             draw_one_number_for_a_token      CPU   0.30 draws a number for every word for each token of a seeded request
             normalise_log_probs_again        CPU   of 49,152 words torch adds up too little: all log-probs are 4e-6 too high
             normalise_in_a_kernel            CPU   a norm is six operations of torch, a twelfth of the time of sampling
             take_the_first_blocks_again      CPU   each step touches other blocks, until all of the cache is in memory
             multiply_adapters_once_...       CPU   every token gets a copy of its adapter: sampling takes 3 times as long
             keep_adapters_from_experts       CPU   with adapters on, experts get Triton kernels, which a CPU lacks
             name_weight_loaders              all   an update asks loaders for a name that partial functions lack
             load_through_loaders             all   gpt-oss writes experts and sinks past the loaders: they stay old
             bind_stores_to_their_address     all   the store of several workers listens on all interfaces
             meet_in_shared_memory            all   the file by which workers meet stays in /tmp when an engine is killed
deltanet.py  serve_every_deltanet             CPU   gated DeltaNet runs in bfloat16 with heads of 64 or 128 only
adapters.py  _load, _add, _activate_adapter   all   adapters are read from directories, and slots written module by module
"""
