"""Data sets as token ids, and a caller's sequences as balanced, packed micro-batches."""

from rl_backend.data.balance import MicroBatchPlan as MicroBatchPlan
from rl_backend.data.balance import plan_micro_batches as plan_micro_batches
from rl_backend.data.balance import plan_tenants as plan_tenants
from rl_backend.data.chat_template import encode_messages as encode_messages
from rl_backend.data.examples import Examples as Examples
from rl_backend.data.hub import local_model as local_model
from rl_backend.data.micro_batches import check_same_fields as check_same_fields
from rl_backend.data.micro_batches import pack as pack
from rl_backend.data.micro_batches import pack_plan as pack_plan
from rl_backend.data.micro_batches import prepare_micro_batches as prepare_micro_batches
from rl_backend.data.micro_batches import restore_order as restore_order
from rl_backend.data.micro_batches import sequences_from_tensordict as sequences_from_tensordict
from rl_backend.data.prefixes import compared_tokens as compared_tokens
from rl_backend.data.prefixes import plan_shared as plan_shared
from rl_backend.data.prompts import load_prompts as load_prompts
from rl_backend.data.prompts import load_tokenizer as load_tokenizer
from rl_backend.data.sft import load_sft_examples as load_sft_examples
