"""What docs/machines.md says to write on other machines: shell, Slurm, Kubernetes."""

import os
import re
import shlex
import subprocess
import sys

import tensorflow.compat.v1 as tf
import yaml

from estimator_mgpu.cluster import tf_config as cluster_config
from estimator_mgpu.cluster.task import addresses
from test_docs import ROOT, blocks_of

SLURM = {'HOSTS': 'n8 n9 n10 ', 'SLURM_JOB_ID': '123456', 'SLURM_NTASKS': '3'}
TASKS = [('chief', 0), ('worker', 0), ('worker', 1)]
NAMES = [f'/job:{job}/task:{index}' for job, index in TASKS]
# Of the manifest in the page, as the Training Operator writes it: services by their short names,
# keys in the order of its structures, and `environment`.
TFJOB = (
    '{"cluster":{"chief":["digits-chief-0.default.svc:2222"],'
    '"worker":["digits-worker-0.default.svc:2222","digits-worker-1.default.svc:2222"]},'
    '"task":{"type":"worker","index":1},"environment":"cloud"}'
)


def blocks(language):
    page = blocks_of(ROOT / 'docs' / 'machines.md')
    return [block for kind, block in page if kind == language]


def read(tf_config, monkeypatch):
    """Returns the task, and the addresses of all."""
    assert cluster_config.with_chief(tf_config) == tf_config
    monkeypatch.setenv('TF_CONFIG', tf_config)
    config = tf.estimator.RunConfig()
    found = addresses(config)
    assert [*found] == NAMES
    return (config.task_type, config.task_id), [*found.values()]


def test_slurm(monkeypatch):
    """In a process of each of Slurm's tasks, and in one without Slurm."""
    shown = "\nprint(os.environ.get('TF_CONFIG'), signal.getsignal(signal.SIGTERM).name)"
    command = [sys.executable, '-c', blocks('python')[1] + shown]
    for rank, task in enumerate(TASKS):
        environment = {**os.environ, **SLURM, 'SLURM_PROCID': str(rank)}
        printed = subprocess.check_output(command, env=environment, text=True)
        tf_config, handler = printed.rsplit(maxsplit=1)
        assert read(tf_config, monkeypatch) == (task, ['n8:23456', 'n9:23456', 'n10:23456'])
        assert handler == ('SIG_IGN' if rank else 'SIG_DFL')
    monkeypatch.delenv('TF_CONFIG')
    assert subprocess.check_output(command, text=True) == 'None SIG_DFL\n'
    script = blocks('bash')[0]
    assert 'export HOSTS=' in script and 'python train.py' in script
    assert '#SBATCH --ntasks-per-node=1\n' in script  # so ranks are in the order of the hosts


def test_tfjob(monkeypatch):
    """It has a chief and workers, with the policy's labels and port."""
    job, policy = yaml.safe_load_all(blocks('yaml')[0])
    selector = policy['spec']['podSelector']
    (rule,) = policy['spec']['ingress']
    assert rule['from'] == [{'podSelector': selector}]
    services = []
    for kind, spec in job['spec']['tfReplicaSpecs'].items():
        template = spec['template']
        assert selector['matchLabels'].items() <= template['metadata']['labels'].items()
        (container,) = template['spec']['containers']
        assert container['name'] == 'tensorflow'  # which gets TF_CONFIG
        (port,) = container['ports']
        assert port['name'] == 'tfjob-port'
        assert rule['ports'] == [{'protocol': 'TCP', 'port': port['containerPort']}]
        (mount,), (volume,) = container['volumeMounts'], template['spec']['volumes']
        assert mount['name'] == volume['name']
        variables = {one['name']: one['value'] for one in container['env']}
        assert variables['MODEL_DIR'].startswith(mount['mountPath'])
        assert "os.environ.get('MODEL_DIR'" in blocks('python')[0]
        name = f'{job["metadata"]["name"]}-{kind.lower()}'
        services += [f'{name}-{i}.default.svc:2222' for i in range(spec['replicas'])]
    assert read(TFJOB, monkeypatch) == (('worker', 1), services)


def test_by_hand(monkeypatch):
    """The page's commands, and the firewall's for their port."""
    by_hand, firewall = [b for b in blocks('sh') if 'CLUSTER=' in b or 'ufw' in b]
    printed = re.sub(r'(export TF_CONFIG=.*)', r'\1\nprintf "%s\\n" "$TF_CONFIG"', by_hand)
    script = printed.replace('python train.py', '')
    found = subprocess.check_output(['sh', '-c', script], text=True).splitlines()
    addresses = [f'host{i}:2222' for i in range(3)]
    assert [read(one, monkeypatch) for one in found] == [(task, addresses) for task in TASKS]
    allow, deny = [shlex.split(line, comments=True) for line in firewall.strip().splitlines()]
    assert allow[allow.index('port') + 1] == deny[-1].partition('/')[0] == '2222'
    assert allow.index('from') and 'deny' in deny  # in this order
